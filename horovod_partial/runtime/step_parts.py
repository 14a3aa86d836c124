"""Tells the core when a program waits for a batch, and when its optimizer has ended a step, without an edit of it.

From this the core computes the parts of a step (`docs/slow-ranks.md`). PyTorch's `DataLoader` and TensorFlow's `Dataset`
are wrapped when this rank is first recorded or watched, and not before. Batches that a graph fetches are not seen.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import threading
import time
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horovod_partial import _attach

# The classes of loaders and of their iterators, the first word of each being the framework.
_LOADERS = ("torch.utils.data.dataloader:DataLoader", "tensorflow.python.data.ops.dataset_ops:DatasetV2")
_ITERATORS = (
    "torch.utils.data.dataloader:_BaseDataLoaderIter",
    "tensorflow.python.data.ops.iterator_ops:OwnedIterator",
)
_STEP_HOOK = "torch.optim.optimizer:register_optimizer_step_post_hook"
_OPTIMIZER = -1  # in place of the number of an iterator: same as Mark::kOptimizer in C++
_NUMBER = "_horovod_partial_number"  # the attribute of an iterator that has its number

_wrapped: set[str] = set()  # the frameworks that were wrapped
_told: list[_attach.Library] = []  # each Horovod of this process that is told. Empty in a forked child
_numbers = itertools.count()
_thread = 0  # the thread that trains: batches that other threads ask for are no wait of the training


def begin(core: _attach.Library) -> None:
    """Tell `core` from now on. The calling thread counts as the one that trains, until a thread steps an optimizer."""
    global _thread
    _thread = threading.get_ident()
    if core not in _told:
        _told.append(core)
        os.register_at_fork(after_in_child=_told.clear)  # there a lock of the core may be held for ever
    for loader, iterator in zip(_LOADERS, _ITERATORS, strict=True):
        framework = loader.partition(".")[0]
        if sys.modules.get(framework) is not None and framework not in _wrapped:
            _wrapped.add(framework)
            try:
                of_loader, of_iterator = resolve_name(loader), resolve_name(iterator)
                if framework == "torch":
                    compiler = sys.modules["torch"].compiler
                    resolve_name(_STEP_HOOK)(compiler.disable(lambda *_: _stepped()))
            except (ImportError, AttributeError):  # the program has something else in its place, so parts are unknown
                continue
            _wrap(of_loader, "__iter__", gives=False)
            _wrap(of_iterator, "__next__", gives=True)


def _stepped() -> None:
    global _thread
    _thread = threading.get_ident()
    _tell(_OPTIMIZER, time.monotonic_ns(), gives=False)


def _tell(number: int, since: int, *, gives: bool) -> None:
    until = time.monotonic_ns()
    for core in _told if threading.get_ident() == _thread else ():
        core.mark(number, since, until, gives)


def _wrap(owner: Any, name: str, *, gives: bool) -> None:
    """Time a method that makes an iterator, or, with `gives`, an iterator's method that gives a batch."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def timed(self: Any) -> Any:
        since = time.monotonic_ns()
        result = method(self)
        iterator = self if gives else result
        if not gives or not hasattr(iterator, _NUMBER):  # a loader may return the same iterator for another pass
            try:
                setattr(iterator, _NUMBER, next(_numbers))
            except AttributeError:  # a loader's own iterator, such as a generator; it asks another one for batches
                return result
        _tell(getattr(iterator, _NUMBER), since, gives=gives)
        return result

    setattr(owner, name, timed)
