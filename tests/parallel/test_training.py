"""Whole trainings: late ranks under a script, and checkpoints."""

import copy
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from harness.buckets import completed
from harness.matrix import front_end, scripted
from harness.trainers import Scripted, Trainer
from harness.world import World

import horovod_partial.torch as hvd

pytestmark = front_end
torch_trainer = pytest.mark.trainers("torch")


def bucket_of(optimizer: torch.optim.Optimizer) -> str:
    (bucket,) = optimizer._exchange.buckets
    return bucket.name


# --- Late ranks under a script ----------------------------------------------------------------------------------------


@torch_trainer
@scripted
def test_a_forgotten_flush_is_told(trainer: Trainer, world: World) -> None:
    late = 1
    script = Scripted(trainer, world, late)
    script.first()
    assert script.optimizer.flushed()
    world.barrier()  # else the others' next round may be over before the late rank has asked
    script.rounds_without_the_late_rank(0)
    script.rounds_without_the_late_rank(1)
    stats = hvd.partial_stats()[bucket_of(script.optimizer)]
    assert (stats["pending"], stats["missed_rounds"]) == (False, 2 if world.rank == late else 0)
    if world.rank == late:
        assert not script.optimizer.flushed()
        with pytest.warns(UserWarning, match=r"state_dict\(\) was called while this rank has late gradients pending"):
            script.optimizer.state_dict()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            script.optimizer.state_dict()  # it is told once
        script.step(0.5)
        assert hvd.partial_stats()[bucket_of(script.optimizer)]["pending"]
    script.optimizer.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        script.optimizer.state_dict()
    assert script.optimizer.flushed()
    world.barrier()


@torch_trainer
@scripted
@pytest.mark.parametrize("late", [0, 1])
def test_a_checkpoint_has_everything(trainer: Trainer, world: World, late: int, tmp_path: Path) -> None:
    """`save_checkpoint` flushes, which moves a schedule that follows rounds: what one rank writes is what all have."""
    path = world.gather(str(tmp_path))[0] + "/checkpoint.pt"
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    script = Scripted(trainer, world, late, "momentum")
    schedule = hvd.follow_rounds(torch.optim.lr_scheduler.StepLR(script.optimizer, 100))
    script.first()
    script.rounds_without_the_late_rank(0)
    for state in (schedule.state_dict(), torch.amp.GradScaler("cpu").state_dict()):
        with pytest.raises(ValueError, match=r"kept was taken before the flush.*not its state_dict\(\)"):
            hvd.save_checkpoint(path, model, script.optimizer, kept=state)
    hvd.save_checkpoint(
        path, model, script.optimizer, epoch=np.int64(3), schedule=schedule, other={"scale": np.ones(1)[0]}
    )
    world.barrier()
    saved = torch.load(path)
    assert (saved["schedule"], saved["other"]) == (schedule.state_dict(), {"scale": 1.0})
    world.same(saved["schedule"]["_steps"])
    assert (saved["epoch"], saved["model"]["weight"].item()) == (3, 0.0)
    assert saved["optimizer"]["param_groups"] == script.optimizer.state_dict()["param_groups"]
    assert saved["optimizer"]["state"][0]["momentum_buffer"].item() == script.total(0)
    assert [entry.name for entry in Path(path).parent.iterdir()] == ["checkpoint.pt"]
    assert script.way == pytest.approx(0.1 * script.total(0))
    with pytest.raises(ValueError, match=r"must be a hvd.DistributedOptimizer"):
        hvd.save_checkpoint(path, model, torch.optim.SGD([script.training.parameters[0]]))


@scripted
def test_buffers_are_averaged(world: World) -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    model[0].running_mean.fill_(float(world.rank))
    model[0].running_var.fill_(2.0 + world.rank)
    model[0].num_batches_tracked.fill_(world.rank)
    hvd.average_buffers(model)
    assert model[0].running_mean.tolist() == [sum(world.ranks) / world.size] * 2
    assert model[0].running_var.tolist() == [2.0 + sum(world.ranks) / world.size] * 2
    assert model[0].num_batches_tracked.item() == world.rank
    hvd.average_buffers(torch.nn.Linear(2, 1))


@scripted
@pytest.mark.parametrize("policy", ["full", "solo"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_learning_rate_of_a_resumed_rank_is_broadcast(world: World, policy: str, momentum: float) -> None:
    """Also of an optimizer without state, of which Horovod sends nothing."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    bare = torch.optim.SGD([parameter], lr=0.0123 if world.rank == 1 else 0.1, momentum=momentum)
    optimizer = hvd.DistributedOptimizer(bare, sync=policy)
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    assert world.same(optimizer.param_groups[0]["lr"]) == pytest.approx(0.0123)
    assert optimizer.param_groups[0]["params"][0] is parameter


@torch_trainer
@scripted
@pytest.mark.parametrize("late", [0, 1])
def test_resume_from_a_checkpoint_after_a_flush(trainer: Trainer, world: World, late: int) -> None:
    """The same weights as not having stopped, under the same script."""

    def phase(script: Scripted, first: int) -> None:
        for number in range(first, first + 2):
            script.rounds_without_the_late_rank(number)
        if world.rank == late:
            script.step(0.25)
        script.optimizer.flush()
        script.rounds = completed(bucket_of(script.optimizer))
        world.barrier()

    through = Scripted(trainer, world, late)
    through.first()
    phase(through, 0)
    state = copy.deepcopy(through.optimizer.state_dict())
    saved = through.training.parameters[0].detach().clone()
    phase(through, 3)

    resumed = Scripted(trainer, world, late)
    with torch.no_grad():
        resumed.training.parameters[0].copy_(saved)
    resumed.optimizer.load_state_dict(state)
    hvd.broadcast_optimizer_state(resumed.optimizer, 0)
    resumed.first()  # a full round 0, with zeros
    phase(resumed, 3)
    assert world.same(resumed.way) == world.same(through.way)


@torch_trainer
@scripted
def test_loading_a_checkpoint_forgets_what_is_pending(trainer: Trainer, world: World) -> None:
    late = 1
    script = Scripted(trainer, world, late)
    script.first()
    script.rounds_without_the_late_rank(0)
    if world.rank == late:
        script.step(0.5)  # pending
    world.barrier()
    state = script.optimizer.state_dict()
    with torch.no_grad():
        script.training.parameters[0].zero_()
    script.optimizer.load_state_dict(state)
    world.barrier()
    script.optimizer.flush()
    assert script.way == 0.0
