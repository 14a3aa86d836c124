"""What needs a reduction that takes long or fails: a test double stands in for `MPI_Allreduce`.

Over Gloo, which is linked into Horovod's library and cannot be replaced, the C++ tests with ranks as threads do the same.
"""

import ctypes
from collections.abc import Iterator

import pytest
import torch
from harness.buckets import collect, completed
from harness.matrix import STEADY
from harness.world import World

import horovod_partial.torch as hvd

pytestmark = pytest.mark.launch(label="double", environment=STEADY, transports=("mpi",), double="mpi_double")


@pytest.fixture
def double(world: World) -> Iterator[ctypes.CDLL]:
    library = ctypes.CDLL(None) if world is not None else None
    yield library
    if library is not None:
        library.double_hold(0)


def number(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int64)


@pytest.mark.parametrize("late", [0, 1])
def test_an_arrival_while_the_round_is_running(world: World, double: ctypes.CDLL, late: int) -> None:
    """[run] It is late for that round, waits for its result only, and is delivered with the next."""
    options = {"name": world.name(), "op": hvd.Sum, "sync": hvd.Quorum(world.size - 1)}
    hvd.partial_allreduce(number(0), **options)
    world.barrier()
    if world.rank == late:
        double.double_hold(1)
    world.barrier()
    handle = hvd.partial_allreduce_async(number(10**world.rank), **options) if world.rank != late else None
    total = sum(10**rank for rank in world.ranks if rank != late)
    if world.rank == late:
        world.until(lambda: double.double_held() == 1, "the reduction is running here")
        handle = hvd.partial_allreduce_async(number(10**late), **options)
        assert not hvd.poll(handle)
        double.double_hold(0)
    assert hvd.synchronize(handle).item() == total
    info = hvd.round_info(handle)
    assert (info.round, info.late, info.fresh) == (1, world.rank == late, world.size - 1)
    hvd.flush()
    assert collect(options["name"], number(0)).item() == 10**late


def test_contributions_while_a_round_is_running_are_not_lost(world: World, double: ctypes.CDLL) -> None:
    """[run] What comes while the pending sum is being sent goes into the next."""
    late = 1
    options = {"name": world.name(), "op": hvd.Sum, "sync": hvd.Quorum(world.size - 1)}
    delivered = hvd.partial_allreduce(number(1), **options).item()
    for step in range(4):
        world.barrier()
        if world.rank == late:
            double.double_hold(1)
        world.barrier()
        if world.rank == late:
            world.until(lambda: double.double_held() == 1, "the reduction is running here")
            handle = hvd.partial_allreduce_async(number(1), **options)
            double.double_hold(0)
        else:
            handle = hvd.partial_allreduce_async(number(1), **options)
        delivered += hvd.synchronize(handle).item()
        world.until(lambda step=step: completed(options["name"]) >= step + 2, "the round has ended here")
    hvd.flush()
    delivered += collect(options["name"], number(0)).item()
    assert delivered == 5 * world.size


def test_an_exception_in_execute(world: World, double: ctypes.CDLL) -> None:
    """[run] Horovod catches it and goes on; the bucket is poisoned on that rank, and says so at once from then on."""
    # With one rank failing the others would wait in MPI: all fail, as they do where a library breaks.
    options = {"name": world.name(), "op": hvd.Sum, "sync": "quorum:1.0"}
    hvd.partial_allreduce(number(1), **options)
    world.barrier()
    double.double_fail(1)
    world.barrier()
    for _ in range(2):
        with pytest.raises(hvd.HorovodInternalError, match="MPI_Allreduce failed"):
            hvd.partial_allreduce(number(1), **options)
    world.barrier()
    # The others are not touched, and Horovod goes on.
    assert hvd.partial_allreduce(number(1), name=world.name("other"), op=hvd.Sum, sync="solo").item() == world.size
    assert hvd.allreduce(number(1), name=world.name("full"), op=hvd.Sum).item() == world.size


def test_an_exception_in_execute_of_a_late_rank(world: World, double: ctypes.CDLL) -> None:
    late = 1
    options = {"name": world.name(), "op": hvd.Sum, "sync": hvd.Quorum(world.size - 1)}
    hvd.partial_allreduce(number(1), **options)
    world.barrier()
    double.double_fail(1)
    world.barrier()
    if world.rank != late:
        with pytest.raises(hvd.HorovodInternalError, match="MPI_Allreduce failed"):
            hvd.partial_allreduce(number(1), **options)
    world.barrier()
    hvd.allreduce(number(1), name=world.name("fence"), op=hvd.Sum)
    with pytest.raises(hvd.HorovodInternalError, match="MPI_Allreduce failed"):
        hvd.partial_allreduce(number(1), **options)
