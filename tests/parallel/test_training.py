"""Whole trainings: late ranks under a script, mixed precision, checkpoints, model averaging."""

from __future__ import annotations

import copy
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.buckets import completed
from harness.matrix import front_end, scripted
from harness.world import World

import horovod_partial.torch as hvd

pytestmark = front_end
EVERYBODY = "quorum:1.0"


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def bucket_of(optimizer: torch.optim.Optimizer) -> str:
    (bucket,) = optimizer._exchange.buckets
    return bucket.name


# --- Late ranks under a script ----------------------------------------------------------------------------------------


class Scripted:
    """One weight, whose gradient on rank r in step s is (s + 1) * 10 ** r; SGD with rate 1 unless stated."""

    def __init__(self, world: World, late: int, make: Any = None, **options: Any) -> None:
        self.world = world
        self.late = late
        self.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        bare = (make or (lambda p: torch.optim.SGD(p, lr=1.0)))([self.weight])
        options = {"op": hvd.Sum, "sync": hvd.Quorum(world.size - 1)} | options
        self.optimizer = hvd.DistributedOptimizer(bare, **options)
        self.rounds = 0

    def step(self, number: int, gradient: float | None = None) -> None:
        self.optimizer.zero_grad()
        value = (number + 1) * 10.0**self.world.rank if gradient is None else gradient
        (self.weight * value).sum().backward()
        self.optimizer.step()

    def round_without_the_late_rank(self, number: int) -> None:
        self.rounds += 1
        if self.world.rank == self.late:
            name = bucket_of(self.optimizer)
            self.world.until(lambda: completed(name) >= self.rounds, "the others' round has ended here")
        else:
            self.step(number)

    def first(self) -> None:
        self.rounds += 1
        self.step(0, 0.0)
        self.world.barrier()

    def total(self, number: int) -> float:
        return sum((number + 1) * 10.0**rank for rank in self.world.ranks if rank != self.late)


@scripted
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("missed", ["replay", "latest"])
def test_missed_results_are_applied(world: World, late: int, missed: str) -> None:
    script = Scripted(world, late, sync=hvd.Quorum(world.size - 1, missed=missed))
    script.first()
    for number in range(3):
        script.round_without_the_late_rank(number)
    if world.rank == late:
        script.step(3, 0.0)
        totals = [script.total(number) for number in range(3)]
        assert -script.weight.item() == (totals[-1] if missed == "latest" else sum(totals))
    script.optimizer.flush()


@scripted
def test_replay_is_the_default_of_optimizers_with_more_state(world: World) -> None:
    """A late Adam takes the same steps as an Adam that was on time."""
    late = 1
    script = Scripted(world, late, make=lambda p: torch.optim.Adam(p, lr=0.1))
    script.first()
    for number in range(4):
        script.round_without_the_late_rank(number)
    if world.rank == late:
        script.step(4, 0.0)
    state = script.optimizer.state[script.weight]
    mine = (script.weight.item(), state["exp_avg"].item(), state["exp_avg_sq"].item(), float(state["step"]))
    everybody = world.gather(mine)
    assert everybody[late] == pytest.approx(everybody[1 - late] if late else everybody[1])
    script.optimizer.flush()


@scripted
def test_a_late_rank_catches_up_in_one_step(world: World) -> None:
    late = 1
    script = Scripted(world, late, sync=hvd.Quorum(world.size - 1, replay_limit=20, max_staleness=100))
    script.first()
    for number in range(12):
        script.round_without_the_late_rank(number)
    if world.rank == late:
        script.step(12, 0.0)
        assert -script.weight.item() == sum(script.total(number) for number in range(12))
    script.optimizer.flush()


@scripted
@pytest.mark.parametrize("late", [0, 1])
def test_flush_applies_what_was_pending_and_missed(world: World, late: int) -> None:
    script = Scripted(world, late)
    script.first()
    for number in range(2):
        script.round_without_the_late_rank(number)
    if world.rank == late:
        script.step(2, 0.5)
    script.optimizer.flush()
    world.same(script.weight.item())
    assert -script.weight.item() == script.total(0) + script.total(1) + 0.5


@scripted
def test_a_forgotten_flush_is_told(world: World) -> None:
    late = 1
    script = Scripted(world, late)
    script.first()
    assert script.optimizer.flushed()
    world.barrier()  # else the others' next round may be over before the late rank has asked
    script.round_without_the_late_rank(0)
    script.round_without_the_late_rank(1)
    stats = hvd.partial_stats()[bucket_of(script.optimizer)]
    assert (stats["pending"], stats["missed_rounds"]) == (False, 2 if world.rank == late else 0)
    if world.rank == late:
        assert not script.optimizer.flushed()
        with pytest.warns(UserWarning, match=r"state_dict\(\) was called while this rank has late gradients pending"):
            script.optimizer.state_dict()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            script.optimizer.state_dict()  # it is told once
        script.step(2, 0.5)
        assert hvd.partial_stats()[bucket_of(script.optimizer)]["pending"]
    script.optimizer.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        script.optimizer.state_dict()
    assert script.optimizer.flushed()
    world.barrier()


@scripted
@pytest.mark.parametrize("late", [0, 1])
def test_a_checkpoint_has_everything(world: World, late: int, tmp_path: Path) -> None:
    """`save_checkpoint` flushes, so what one rank writes is what all have."""
    path = world.gather(str(tmp_path))[0] + "/checkpoint.pt"
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    script = Scripted(world, late)
    script.first()
    script.round_without_the_late_rank(0)
    hvd.save_checkpoint(path, model, script.optimizer, epoch=3)
    world.barrier()
    saved = torch.load(path)
    assert (saved["epoch"], saved["model"]["weight"].item()) == (3, 0.0)
    assert saved["optimizer"].keys() == script.optimizer.state_dict().keys()
    assert [entry.name for entry in Path(path).parent.iterdir()] == ["checkpoint.pt"]
    assert -script.weight.item() == script.total(0)
    with pytest.raises(ValueError, match=r"must be a hvd.DistributedOptimizer"):
        hvd.save_checkpoint(path, model, torch.optim.SGD([script.weight]))


@scripted
@pytest.mark.parametrize("late", [0, 1])
def test_a_checkpoint_has_the_schedule_of_its_model(world: World, late: int, tmp_path: Path) -> None:
    """The flush of `save_checkpoint` moves a schedule that follows rounds."""
    path = world.gather(str(tmp_path))[0] + "/checkpoint.pt"
    model = torch.nn.Linear(1, 1, bias=False)
    script = Scripted(world, late)
    schedule = hvd.follow_rounds(torch.optim.lr_scheduler.StepLR(script.optimizer, 100))
    script.first()
    script.round_without_the_late_rank(0)
    for state in (schedule.state_dict(), torch.amp.GradScaler("cpu").state_dict()):
        with pytest.raises(ValueError, match=r"kept was taken before the flush.*not its state_dict\(\)"):
            hvd.save_checkpoint(path, model, script.optimizer, kept=state)
    hvd.save_checkpoint(path, model, script.optimizer, schedule=schedule, other={"scale": 1.0})
    world.barrier()
    saved = torch.load(path)
    assert saved["schedule"] == schedule.state_dict()
    assert saved["other"] == {"scale": 1.0}
    world.same(saved["schedule"]["_steps"])


@scripted
def test_buffers_are_averaged(world: World) -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    model[0].running_mean.fill_(float(world.rank))
    model[0].running_var.fill_(2.0)
    model[0].num_batches_tracked.fill_(world.rank)
    hvd.average_buffers(model)
    assert model[0].running_mean.tolist() == [sum(world.ranks) / world.size] * 2
    assert model[0].running_var.tolist() == [2.0] * 2
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


@scripted
@pytest.mark.parametrize("late", [0, 1])
def test_resume_from_a_checkpoint_after_a_flush(world: World, late: int) -> None:
    """The same weights as not having stopped, under the same script."""

    def phase(script: Scripted, first: int) -> None:
        for number in range(first, first + 2):
            script.round_without_the_late_rank(number)
        if world.rank == late:
            script.step(first + 2, 0.25)
        script.optimizer.flush()
        script.rounds = completed(bucket_of(script.optimizer))
        world.barrier()

    through = Scripted(world, late)
    through.first()
    phase(through, 0)
    state = copy.deepcopy(through.optimizer.state_dict())
    saved = through.weight.detach().clone()
    phase(through, 3)

    resumed = Scripted(world, late)
    with torch.no_grad():
        resumed.weight.copy_(saved)
    resumed.optimizer.load_state_dict(state)
    hvd.broadcast_optimizer_state(resumed.optimizer, 0)
    resumed.first()  # a full round 0, with zeros
    phase(resumed, 3)
    assert world.same(resumed.weight.item()) == world.same(through.weight.item())


@scripted
@pytest.mark.parametrize("policy", ["full", EVERYBODY])
def test_resume_gives_the_same_weights(world: World, policy: str) -> None:
    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        bare = torch.optim.Adam(model.parameters(), lr=0.01)
        return model, hvd.DistributedOptimizer(bare, model.named_parameters(), sync=policy)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(100 * step + world.rank))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    model, optimizer = make()
    train(model, optimizer, range(5))
    optimizer.flush()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, range(5, 10))
    optimizer.flush()

    again, resumed = make()
    checkpoint = torch.load(io.BytesIO(file.getvalue()))
    again.load_state_dict(checkpoint["model"])
    resumed.load_state_dict(checkpoint["optimizer"])
    train(again, resumed, range(5, 10))
    resumed.flush()
    assert torch.allclose(weights(again), weights(model), atol=1e-7)


@scripted
def test_loading_a_checkpoint_forgets_what_is_pending(world: World) -> None:
    late = 1
    script = Scripted(world, late)
    script.first()
    script.round_without_the_late_rank(0)
    if world.rank == late:
        script.step(1, 0.5)  # pending
    world.barrier()
    state = script.optimizer.state_dict()
    with torch.no_grad():
        script.weight.zero_()
    script.optimizer.load_state_dict(state)
    world.barrier()
    script.optimizer.flush()
    assert script.weight.item() == 0.0


# --- Mixed precision --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler_equals_training_without_one(world: World, unscale: bool) -> None:
    results = []
    for scaled in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=256.0)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05),
            sync=EVERYBODY,
            grad_scaler=scaler if scaled else None,
        )
        for step in range(3):
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(100 * step + world.rank))
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            if unscale and scaled:
                scaler.unscale_(optimizer)
            if scaled:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
        results.append(weights(model))
    closed_by = [stats["closed_by"] for name, stats in hvd.partial_stats().items() if "DistributedOptimizer" in name]
    assert torch.allclose(results[0], results[1], atol=1e-6), closed_by


@pytest.mark.parametrize("sync", ["full", "majority"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_that_the_optimizer_does_not_know(world: World, sync: str, fused: bool) -> None:
    """Horovod's recipe for mixed precision as it stands works, or raises on every rank before anything is applied."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    before = weights(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, fused=fused)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), sync=sync)

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(model(torch.full((1, 4), world.rank + 1.0)).square().mean()).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()

    if sync == "full":
        step()
        assert not torch.equal(weights(model), before)
        hvd.assert_replicas_equal(model)
        return
    with pytest.raises(RuntimeError, match=r"wrapped without it: .* grad_scaler=scaler"):
        step()
    assert torch.equal(weights(model), before)


@scripted
@pytest.mark.parametrize("bad", [float("inf"), float("nan")], ids=str)
def test_a_late_gradient_that_is_not_finite_is_dropped_and_counted(world: World, bad: float) -> None:
    late = 1
    script = Scripted(world, late)
    script.first()
    script.round_without_the_late_rank(0)
    if world.rank == late:
        script.step(1, bad)  # gets round 1, and would deliver this
        assert -script.weight.item() == script.total(0)
    script.optimizer.flush()
    dropped = world.gather(hvd.partial_stats()[bucket_of(script.optimizer)]["dropped"])
    assert -script.weight.item() == script.total(0)
    assert dropped == [int(rank == late) for rank in world.ranks]


# --- Statistics -------------------------------------------------------------------------------------------------------


def test_statistics(world: World) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), sync="majority")
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    optimizer.flush()
    stats = hvd.partial_stats()[bucket_of(optimizer)]
    keys = {"rounds", "closed_by", "on_time", "late", "fresh_mean", "fresh_histogram", "staleness_histogram"}
    assert keys | {"waited_seconds", "dropped", "bytes_held"} <= set(stats)
    assert sum(stats["closed_by"].values()) == stats["rounds"] == sum(stats["fresh_histogram"].values())
    for on_time, late in zip(stats["on_time"], stats["late"], strict=True):
        assert on_time + late == stats["rounds"]
    world.same([stats[key] for key in ("rounds", "closed_by", "on_time", "late", "fresh_histogram")])
