"""Rounds under a script beside other collectives, with PyTorch's handles; `test_conformance_rounds.py` has the rest."""

import pytest
import torch
from harness.fronts import front_of
from harness.matrix import STEADY, scripted
from harness.script import Script, all_but, total, value
from harness.world import World

import horovod_partial.torch as hvd

pytestmark = scripted
FRONT = front_of("torch")
# With a cycle of 100 ms rounds close in the same one.
SLOW = pytest.mark.launch(label="slow-cycle", environment=STEADY | {"HOROVOD_CYCLE_TIME": "100"})


def test_buckets_are_late_on_their_own(world: World) -> None:
    late = 1
    one = Script(FRONT, world, sync=all_but(late, world), name=world.name("one"))
    two = Script(FRONT, world, sync=all_but(late, world), name=world.name("two"))
    one.first()
    two.first()
    if world.rank == late:
        one.completed(2)
        assert one.arrive(value(late))[1].late
        handle = two.start(value(late))  # before the others, so it is on time
        world.tell("arrived")
        assert not two.end(handle)[1].late
    else:
        one.arrive(value(world.rank))
        world.wait_for("arrived")
        two.arrive(value(world.rank))
    hvd.flush()


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_rank_beside_an_allgather(world: World, late: int) -> None:
    """[run] Fusing looks tensors up behind an allgather before the responses are sent: the late entry must be there."""
    script = Script(FRONT, world, sync=all_but(late, world))
    script.first()
    for step in range(5):
        handle = script.start(value(world.rank)) if world.rank != late else None
        rows = hvd.allgather_async(torch.full((1, 3), world.rank), name=world.name("rows"))
        if handle is not None:
            assert script.end(handle)[0] == total(world, without=late)
        assert hvd.synchronize(rows)[:, 0].tolist() == list(world.ranks)
        script.completed(2 + step)
        world.barrier()
    if world.rank == late:
        assert script.arrive(0)[0] == 5 * total(world, without=late)
    hvd.flush()


@SLOW
@pytest.mark.full_matrix("gloo")
def test_fused_buckets(world: World) -> None:
    """[run] Rounds that close in one cycle travel fused, with their like only."""
    late = 1
    scales = [1.0, 1.0, 2.0, 1.0, 2.0, 1.0]
    scripts = [
        Script(FRONT, world, sync=all_but(late, world), name=world.name(str(i)), prescale_factor=scale)
        for i, scale in enumerate(scales)
    ]
    starts = [script.start(0) for script in scripts]
    for script, start in zip(scripts, starts, strict=True):
        script.end(start)
    world.barrier()
    for step in range(3):
        beside = hvd.allreduce_async(torch.ones(1), name=world.name("beside"), op=hvd.Sum)
        if world.rank != late:
            handles = [script.start(value(world.rank) * (i + 1)) for i, script in enumerate(scripts)]
            for i, (script, handle) in enumerate(zip(scripts, handles, strict=True)):
                assert script.end(handle)[0] == total(world, without=late) * (i + 1) * scales[i]
        assert hvd.synchronize(beside).item() == world.size
        for script in scripts:
            script.completed(2 + step)
        world.barrier()
    if world.rank == late:
        for i, script in enumerate(scripts):
            assert script.arrive(0)[0] == 3 * total(world, without=late) * (i + 1) * scales[i]
    hvd.flush()


@SLOW
@pytest.mark.full_matrix("gloo")
def test_large_buckets_beside_fused_ones(world: World) -> None:
    """Rounds that close in one cycle: buckets of 4 MiB are taken out of what Horovod has fused."""
    late = 1
    elements = [10, 1 << 20, 20, (1 << 20) + 1, 30]
    arguments = {"op": hvd.Sum, "sync": all_but(late, world)}
    tensors = [torch.empty(count) for count in elements]
    names = [world.name(str(i)) for i in range(len(tensors))]

    def arrive(value: float) -> None:
        handles = [
            hvd.partial_allreduce_async_(tensor.fill_(value * (i + 1)), name=names[i], **arguments)
            for i, tensor in enumerate(tensors)
        ]
        for handle in handles:
            hvd.synchronize(handle)

    def expect(value: float) -> None:
        for i, tensor in enumerate(tensors):
            assert tensor.eq(value * (i + 1)).all()

    arrive(1)
    expect(world.size)
    for step in range(2):
        world.barrier()
        if world.rank != late:
            arrive(1)
            expect(world.size - 1)
        for name in names:
            world.until(lambda name=name, step=step: FRONT.completed(name) >= 2 + step, "the round has ended here")
    if world.rank == late:
        arrive(0)
        expect(2 * (world.size - 1))
    hvd.flush()


def test_round_info_of_an_operation_under_way(world: World) -> None:
    script = Script(FRONT, world, sync="quorum:1.0")
    handle = script.start(1.0) if world.rank == 0 else None
    script.must_wait(handle)
    if handle is not None:
        with pytest.raises(ValueError, match="has not finished"):
            hvd.round_info(handle.handle)
    world.barrier()
    handle = handle or script.start(1.0)
    world.until(lambda: handle.done(), "the operation has finished")
    assert hvd.round_info(handle.handle).round == 0
    assert script.end(handle)[0] == world.size
