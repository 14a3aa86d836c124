"""What the devices of ranks mean in a job on GPUs, or on the double of one (`make test-gpu-double`): joins, zeros, mixed jobs."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness.matrix import scripted
from harness.whole_jobs import Job
from harness.world import World
from horovod.common.exceptions import HorovodInternalError

import horovod_partial
import horovod_partial.torch as hvd
from horovod_partial.torch import devices, operations

HOST = -1

pytestmark = [
    scripted,
    pytest.mark.skipif(  # a text, since it is asked in the process without ranks too, where no tensor lies on the GPU
        "config.getoption('device') == 'cpu' and devices.device_number(torch.device('cpu')) == HOST",
        reason="needs a GPU (--device), or the double of one",
    ),
]
on_the_double = pytest.mark.skipif(operations.mpi_ops.cuda_built(), reason="needs the double of a GPU")
joins_on_gpus = pytest.mark.skipif(not operations.mpi_ops.cuda_built(), reason="Horovod without CUDA joins on the host")


def reduce(name: str) -> float:
    """How many ranks have reduced a one."""
    return hvd.partial_allreduce(torch.ones(3), name=name, op=hvd.Sum, sync="quorum:1.0")[0].item()


@joins_on_gpus
@pytest.mark.parametrize("joins", [0, 1])
def test_join_goes_to_the_device_of_the_ranks_tensors(world: World, joins: int) -> None:
    name = world.name()
    assert reduce(name) == world.size
    assert operations.runtime.device_of_buckets() == devices.device_number(torch.zeros(1).device)
    if world.rank != joins:
        for _ in range(3):
            assert reduce(name) == world.size - 1
    hvd.join()
    assert reduce(name) == world.size


@joins_on_gpus
@pytest.mark.parametrize("joins", [0, 1])
def test_a_rank_that_has_joined_before_round_0_takes_part_in_it(world: World, joins: int) -> None:
    name = world.name()
    if world.rank != joins:
        assert reduce(name) == world.size - 1
    hvd.join(device=0)
    assert reduce(name) == world.size


# Options of a reduction of ones, and what one rank contributes to the result among `size` ranks.
OPERATIONS: dict[str, tuple[dict[str, Any], Callable[[int], float]]] = {
    "sum": ({"op": hvd.Sum}, lambda size: 1.0),
    "average": ({"op": hvd.Average}, lambda size: 1 / size),
    "scaled": ({"op": hvd.Sum, "prescale_factor": 0.5, "postscale_factor": 3.0}, lambda size: 1.5),
}


@pytest.mark.parametrize("stays", [0, 1])
@pytest.mark.parametrize("device", [HOST, pytest.param(0, marks=joins_on_gpus)])
def test_zeros_elsewhere_are_left_out(world: World, stays: int, device: int) -> None:
    """Ranks that have joined on another kind of device take no part in a reduction, and what is scaled stays scaled."""
    tensor = torch.ones(3) if device == HOST else torch.ones(3, device="cpu")

    def reduce_all(leavers: int) -> None:
        for kind, (options, of_one_rank) in OPERATIONS.items():
            name = world.name(f"{tensor.device.type} {kind}")
            result = hvd.partial_allreduce(tensor, name=name, sync="quorum:1.0", **options)
            assert result.tolist() == [of_one_rank(world.size) * (world.size - leavers)] * 3, kind

    reduce_all(0)
    if world.rank in (stays, (stays + 1) % world.size):
        reduce_all(world.size - 2)  # in a group of two
    if world.rank == stays:
        reduce_all(world.size - 1)  # in a group of one
    hvd.join(device=device)
    reduce_all(0)


def test_ranks_on_hosts_and_on_gpus_are_refused_by_name(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    name = world.name()
    with monkeypatch.context() as patch:
        if world.rank == 0:
            patch.setattr(operations, "device_number", lambda _: HOST)
            patch.setattr(operations, "_config_of", operations._config_of.__wrapped__)  # which remembers devices
        with pytest.raises(HorovodInternalError, match=r"device CPU.*device GPU.*\(rank 0 and rank 1\)"):
            reduce(name)
    assert reduce(name) == world.size


@on_the_double
def test_only_a_late_rank_waits_for_the_stream(world: World) -> None:
    """Otherwise the device would have nothing to do until the host has queued the next step."""
    library = ctypes.CDLL(f"{horovod_partial.__path__[0]}/libhorovod_partial_attach.so")
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)], sync="solo")

    def step() -> None:
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()

    step()
    world.barrier()
    before = library.double_waits()
    if world.rank == 0:
        step()
        assert library.double_waits() == before
    world.barrier()
    if world.rank != 0:
        world.until(lambda: optimizer._exchange.family.has_round, "the round has ended here")
        step()
        assert library.double_waits() > before
    optimizer.flush()


@pytest.mark.launch(label="job")
@on_the_double
@pytest.mark.parametrize("fails", [0, 1])
def test_every_rank_is_told_of_a_device_without_memory(job: Job, fails: int) -> None:
    """A late rank needs memory for zeros, finds none, and takes part with other memory until all have heard."""
    assert job.run("no_memory", str(fails)) != 0
    errors = job.notes("error")
    assert len(errors) == job.setup.ranks, job.output()
    for error in errors.values():
        assert f"rank {fails} has failed: rank {fails} could not keep what belongs to bucket: std::bad_alloc" in error
