"""Tells the core when a program asks for a batch, and when its optimizer has ended a step, without an edit of it.

From these times the core computes the parts of a step (`docs/slow-ranks.md`). The iterators of PyTorch's `DataLoader` and
of TensorFlow's `Dataset` are wrapped when this rank is first recorded or watched, and never otherwise. A `Dataset` that is
iterated within a graph is not seen.
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

# By framework: the class of its loaders, and that of their iterators.
_LOADERS = {
    "torch": ("torch.utils.data.dataloader:DataLoader", "torch.utils.data.dataloader:_BaseDataLoaderIter"),
    "tensorflow": (
        "tensorflow.python.data.ops.dataset_ops:DatasetV2",
        "tensorflow.python.data.ops.iterator_ops:OwnedIterator",
    ),
}
_STEP_HOOK = "torch.optim.optimizer:register_optimizer_step_post_hook"
_OPTIMIZER = -1  # in place of the number of an iterator: same as Mark::kOptimizer in C++
_NUMBER = "_horovod_partial_number"  # the attribute of an iterator that has its number

_wrapped: set[str] = set()  # the frameworks whose loaders are wrapped
_told: list[_attach.Library] = []  # whom to tell: each Horovod of this process. Empty in a forked child
_numbers = itertools.count()
_thread = 0  # the thread that trains. A batch that another thread asks for is no wait of the training


def begin(core: _attach.Library) -> None:
    """Tell `core` from now on. The calling thread counts as the one that trains, until a thread steps an optimizer."""
    global _thread
    _thread = threading.get_ident()
    if not _told:
        os.register_at_fork(after_in_child=_told.clear)  # there the core's locks may be held for ever
    if core not in _told:
        _told.append(core)
    for framework in _LOADERS.keys() - _wrapped:
        if framework in sys.modules:
            _wrapped.add(framework)
            loader, iterator = map(resolve_name, _LOADERS[framework])
            _wrap_loader(loader)
            _wrap_iterator(iterator)
            if framework == "torch":
                resolve_name(_STEP_HOOK)(lambda *_: _stepped())


def _stepped() -> None:
    global _thread
    _thread = threading.get_ident()
    _tell(_OPTIMIZER, time.monotonic_ns(), gives=False)


def _tell(number: int, since: int, *, gives: bool) -> None:
    if threading.get_ident() == _thread:
        until = time.monotonic_ns()
        for core in _told:
            core.mark(number, since, until, gives)


def _wrap_loader(loader: Any) -> None:
    make = loader.__iter__

    @functools.wraps(make)
    def iterate(self: Any) -> Any:
        since = time.monotonic_ns()
        iterator = make(self)
        setattr(iterator, _NUMBER, next(_numbers))  # a new one, even if the loader returns an iterator again
        _tell(getattr(iterator, _NUMBER), since, gives=False)
        return iterator

    loader.__iter__ = iterate


def _wrap_iterator(iterator: Any) -> None:
    advance = iterator.__next__

    @functools.wraps(advance)
    def following(self: Any) -> Any:
        since = time.monotonic_ns()
        batch = advance(self)
        if not hasattr(self, _NUMBER):  # it was made before its loader was wrapped
            setattr(self, _NUMBER, next(_numbers))
        _tell(getattr(self, _NUMBER), since, gives=True)
        return batch

    iterator.__next__ = following
