"""PyTorch's own forms of `hvd.partial_allreduce`; `test_conformance_operations.py` has what all front ends share."""

import functools
import re
import weakref
from typing import Any

import horovod.torch
import pytest
import torch
from harness.matrix import alone
from harness.trainers import EVERYBODY
from harness.world import World, expected_sum
from torch.overrides import TorchFunctionMode

import horovod_partial.torch as hvd
from horovod_partial.settings import settings


@pytest.mark.parametrize(
    ("kind", "suffixes", "options"),
    [
        ("partial_allreduce", ("", "_", "_async", "_async_"), {"sync": EVERYBODY}),
        ("average", ("", "_async"), {"policy": hvd.PartialReduce(99)}),
    ],
    ids=["partial_allreduce", "average"],
)
def test_forms(world: World, kind: str, suffixes: tuple[str, ...], options: dict[str, Any]) -> None:
    """Out of place and in place, with and without a handle."""
    for suffix in suffixes:
        tensor = torch.full((2, 3), world.rank + 1.0)
        result = getattr(hvd, kind + suffix)(tensor, name=world.name(), **options)
        if "async" in suffix:
            result = hvd.synchronize(result)
        assert result.tolist() == [[expected_sum(world) / world.size] * 3] * 2
        assert (result is tensor) == suffix.endswith("_")


def test_full_is_horovods_own_operation(world: World) -> None:
    torch.manual_seed(world.rank)
    tensor = torch.rand(1000)
    for policy in (hvd.Full(), "full", None):
        handle = hvd.partial_allreduce_async(tensor, name=world.name("ours"), sync=policy)
        assert isinstance(handle, int)
        info = hvd.round_info(handle)
        ours = hvd.synchronize(handle)
        theirs = horovod.torch.allreduce(tensor, name=world.name("theirs"))
        assert torch.allclose(ours, theirs, atol=1e-6)
        assert (info.round, info.late, info.fresh, info.gradients) == (-1, False, -1, -1)
    largest = hvd.partial_allreduce(torch.tensor([world.rank]), name=world.name("max"), op=hvd.Max, sync="full")
    assert largest.item() == world.size - 1


def test_the_default_policy_may_change(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """`init` takes that of rank 0, which may be another rank after a restart of an elastic job."""
    for default, has_rounds in (("full", False), ("quorum:1.0", True)):
        monkeypatch.setattr(settings(), "sync", default)
        handle = hvd.partial_allreduce_async(torch.ones(3), name=world.name(default))
        hvd.synchronize(handle)
        assert (hvd.round_info(handle).round >= 0) == has_rounds


@alone
def test_handles_that_nobody_synchronizes_are_dropped(world: World) -> None:
    def start(number: int) -> Any:
        return weakref.ref(hvd.partial_allreduce_async(torch.ones(3), name=world.name(str(number)), sync=EVERYBODY))

    dropped = [start(number) for number in range(3)]
    world.until(lambda: all(handle() is None or handle().poll() for handle in dropped), "they have ended")
    for number in range(3, 3 + 17):  # they are looked for when there are more than 16
        start(number)
    assert [handle() for handle in dropped] == [None] * 3


@alone
def test_modes_see_nothing_of_an_operation(world: World) -> None:
    seen: list[Any] = []

    class Watching(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.ones(3, dtype=dtype)
        with Watching():
            handle = hvd.partial_allreduce_async_(tensor, name=world.name(str(dtype)), sync=EVERYBODY)
        hvd.synchronize(handle)
    assert seen == []


@alone
def test_tensors_that_are_refused(world: World) -> None:
    average = functools.partial(hvd.average, policy=hvd.GroupAverage())
    for call in (functools.partial(hvd.partial_allreduce, sync=EVERYBODY), average):
        with pytest.raises(ValueError, match="required to be contiguous"):
            call(torch.zeros(4, 4).t()[:2], name=world.name())
        with pytest.raises(ValueError, match="meta"):
            call(torch.zeros(3, device="meta"), name=world.name())
    with pytest.raises(ValueError, match="not differentiable"):
        average(torch.zeros(2, requires_grad=True), name=world.name())


def test_full_on_one_rank_only(world: World) -> None:
    """`Full()` is Horovod's own path, under Horovod's own name: the ranks wait for each other there and here."""
    order = ("full", "solo") if world.rank == 1 else ("solo", "full")
    options = {"name": world.name(), "op": hvd.Sum}
    handles = {sync: hvd.partial_allreduce_async(torch.ones(1), sync=sync, **options) for sync in order}
    for sync in ("full", "solo"):
        assert hvd.synchronize(handles[sync]).item() == world.size


def test_name_in_use(world: World) -> None:
    name = world.name()
    start = lambda: hvd.partial_allreduce_async(torch.ones(1), name=name, op=hvd.Sum, sync=EVERYBODY)
    handle = start() if world.rank == 0 else None
    if handle is not None:
        with pytest.raises(ValueError, match=rf"rank 0: the name {re.escape(name)} is in use by an operation"):
            start()
    world.barrier()
    handle = handle or start()
    assert hvd.synchronize(handle).item() == world.size
