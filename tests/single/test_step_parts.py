"""What a program does is told to the core, without an edit: its requests for batches, and its optimizer's steps."""

import importlib
import sys
import threading
import types
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from horovod_partial.runtime import step_parts

OPTIMIZER = -1


class Core:
    """Keeps what it is told: the number of the iterator, and whether a batch came."""

    def __init__(self) -> None:
        self.marks: list[tuple[int, bool]] = []
        self.end = 0

    def mark(self, iterator: int, begin: int, end: int, gives: bool) -> None:
        assert self.end <= begin <= end, "in nanoseconds of one clock"
        self.end = end
        self.marks.append((iterator, gives))

    def take(self) -> list[tuple[int, bool]]:
        marks, self.marks = self.marks, []
        return marks


@pytest.fixture
def unwrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes that are wrapped are as before afterwards."""
    for owner, name in ((DataLoader, "__iter__"), (_BaseDataLoaderIter, "__next__")):
        monkeypatch.setattr(owner, name, vars(owner)[name])
    monkeypatch.setattr(sys.modules["torch.optim.optimizer"], "_global_optimizer_post_hooks", OrderedDict())
    monkeypatch.setattr(step_parts, "_wrapped", {"tensorflow"})
    monkeypatch.setattr(step_parts, "_told", [])


@pytest.fixture
def core(unwrapped: None) -> Iterator[Any]:
    core: Any = Core()
    step_parts.begin(core)
    yield core
    step_parts._told.clear()


def step() -> None:
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]).step()


def test_nothing_is_wrapped_before_this_rank_is_timed(unwrapped: None) -> None:
    assert not hasattr(DataLoader.__iter__, "__wrapped__")
    assert not hasattr(_BaseDataLoaderIter.__next__, "__wrapped__")


def test_loaders_are_wrapped_once(core: Any) -> None:
    step_parts.begin(core)
    assert not hasattr(DataLoader.__iter__.__wrapped__, "__wrapped__")
    list(DataLoader([1, 2]))
    step()
    assert [gives for _, gives in core.take()] == [False, True, True, False]


def test_each_pass_over_a_loader_has_a_number(core: Any) -> None:
    loader = DataLoader([1, 2])
    (first, _), *_ = (list(loader), core.take())[1]
    (second, _), *_ = (list(loader), core.take())[1]
    assert first != second
    both = zip(loader, DataLoader([1, 2]), strict=True)
    assert len(list(both)) == 2
    numbers = {number for number, _ in core.take()}
    assert len(numbers) == 2
    assert not numbers & {first, second, OPTIMIZER}


def test_an_iterator_that_was_made_before_has_a_number_too(unwrapped: None) -> None:
    iterator = iter(DataLoader([1, 2]))
    core: Any = Core()
    step_parts.begin(core)
    next(iterator), next(iterator)
    (number, gives), other = core.take()
    assert (number, gives) == other
    assert number != OPTIMIZER
    assert gives


def test_a_loader_may_return_a_generator(core: Any) -> None:
    class Loader(DataLoader):  # type: ignore[type-arg]
        def _get_iterator(self) -> Any:
            yield from super()._get_iterator()

    assert len(list(Loader(range(4)))) == 4
    assert [gives for _, gives in core.take()].count(True) == 4


def test_what_is_no_framework_is_left_alone(unwrapped: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    monkeypatch.setattr(step_parts, "resolve_name", lambda name: importlib.import_module("nothing." + name))
    step_parts.begin(Core())  # type: ignore[arg-type]
    assert not hasattr(DataLoader.__iter__, "__wrapped__")


def test_only_the_thread_that_trains_waits_for_its_loader(core: Any) -> None:
    def on_a_thread(function: Any) -> None:
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()

    on_a_thread(lambda: list(DataLoader([1])))
    assert core.take() == [], "this thread has begun"
    on_a_thread(step)
    assert core.take() == [(OPTIMIZER, False)]
    list(DataLoader([1]))
    assert core.take() == [], "the other one trains"


def test_what_a_loader_raises_is_its_own(core: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        list(DataLoader([0], collate_fn=lambda samples: 1 // samples[0]))
    assert [gives for _, gives in core.take()] == [False]
