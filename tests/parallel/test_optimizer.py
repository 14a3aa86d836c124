"""`hvd.DistributedOptimizer`: every form of training that PyTorch's users know, under every policy.

What averages of models alone have is in `test_model_optimizer.py`.
"""

import copy
import gc
import itertools
import pickle
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import horovod.torch
import pytest
import torch
from harness.matrix import alone, front_end
from harness.torch_training import (
    GRADIENTS,
    KINDS,
    MAKERS,
    check_replicas,
    loss_of,
    make_model,
    reference,
    state,
    sync_of,
    take_step,
    train,
    weights,
    wrap,
    wrapped,
)
from harness.trainers import EVERYBODY
from harness.world import World
from torch.utils._python_dispatch import TorchDispatchMode

import horovod_partial.torch as hvd
from horovod_partial.settings import settings
from horovod_partial.torch import bucket_set

pytestmark = front_end


def test_step_after_synchronize_warns(world: World) -> None:
    model, optimizer = wrapped(EVERYBODY)
    loss_of(model, world.rank, 0).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()
    train(world, optimizer, model, 1, first=1)
    assert weights(model) == pytest.approx(reference(world, "momentum", 2), abs=1e-5)


def test_too_many_backward_passes(world: World) -> None:
    model, optimizer = wrapped(EVERYBODY)
    loss_of(model, world.rank, 0).backward()
    with pytest.raises(AssertionError, match="backward_passes_per_step"):
        loss_of(model, world.rank, 0).backward()
    optimizer.step()


def test_backward_in_two_threads(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd has a thread for each device. One of them names the buckets, and the other arrives under these names."""
    towers = [make_model() for _ in range(2)]
    parameters = [list(tower.parameters()) for tower in towers]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([*parameters[0], *parameters[1]], lr=0.1, momentum=0.9), groups=parameters, sync=EVERYBODY
    )
    name = optimizer._exchange._set._name
    current = name.current
    monkeypatch.setattr(name, "current", lambda: [time.sleep(0.2), current()][1])
    threads = [
        threading.Thread(target=lambda tower=tower: loss_of(tower, world.rank, 0).backward()) for tower in towers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    optimizer.step()
    for tower in towers:
        assert weights(tower) == pytest.approx(reference(world, "momentum", 1), abs=1e-5)


def test_backward_after_a_refused_capture(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a capture into a CUDA graph would have reduced is not half reduced. The refusal is a mock: it needs a GPU."""
    model, optimizer = wrapped(EVERYBODY)

    def refuse(_: torch.device) -> None:
        raise RuntimeError("refused")

    with monkeypatch.context() as patch:
        patch.setattr(bucket_set, "refuse_capture", refuse)
        with pytest.raises(RuntimeError, match="refused"):
            loss_of(model, world.rank, 0).backward()
    train(world, optimizer, model, 2)
    assert weights(model) == pytest.approx(reference(world, "momentum", 2), abs=1e-5)


@pytest.mark.parametrize(("policy", "slow"), [("solo", 0.0), ("solo", 0.3), ("majority", 0.0)])
def test_a_collective_in_a_round_hook_and_one_in_the_loop(world: World, policy: str, slow: float) -> None:
    """A rank that waits in the loop takes the rounds in whose hook the others wait, even if it has missed only one."""
    model, optimizer = wrapped(policy)
    sums: dict[str, list[float]] = {"hook": [], "loop": []}

    def add(place: str) -> None:
        sums[place].append(hvd.allreduce(torch.ones(1), op=hvd.Sum, name=world.name(place)).item())

    optimizer.register_round_hook(lambda _: add("hook") if next(rounds) % 3 == 2 else None)
    rounds = itertools.count()
    for step in range(15):
        seconds = 0.01 * ((step + world.rank) % 3) + slow * (world.rank == world.size - 1)
        train(world, optimizer, model, 1, first=step, seconds=seconds)
        if step % 3 == 2:
            add("loop")
    optimizer.flush()
    world.same(len(sums["hook"]))
    assert sums == {"hook": [world.size] * len(sums["hook"]), "loop": [world.size] * 5}


def test_clipping_by_hand_after_a_long_wait(world: World) -> None:
    """A rank that was on time has missed nothing, however long it waits for a collective of the loop."""
    model, optimizer = wrapped(EVERYBODY)
    hvd.follow_rounds(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    time.sleep(1.5 * (world.rank == world.size - 1))
    loss_of(model, world.rank, 0).backward()
    time.sleep(1.5 * (world.rank == world.size - 1))  # the round ends while the others wait in the loop
    hvd.allreduce(torch.ones(1), name=world.name())
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with optimizer.skip_synchronize():
        optimizer.step()
    optimizer.flush()
    world.same(weights(model))


def test_lbfgs(world: World) -> None:
    """It searches along a line, so every rank must see the same loss beside the same gradients."""

    def minimise(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ranks: Sequence[int]) -> list[float]:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = sum(loss_of(model, rank, 0) for rank in ranks) / len(ranks)
            loss.backward()
            return loss

        return [float(optimizer.step(closure)) for _ in range(3)]

    def lbfgs(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5, line_search_fn="strong_wolfe")

    model, alone = make_model(), make_model()
    losses = minimise(model, hvd.DistributedOptimizer(lbfgs(model), model.named_parameters()), [world.rank])
    world.same(weights(model))
    assert losses == pytest.approx(minimise(alone, lbfgs(alone), world.ranks), rel=1e-3)
    assert weights(model) == pytest.approx(weights(alone), abs=5e-3)  # the search amplifies rounding: 1.2e-3 with NCCL


@pytest.mark.parametrize("policy", ["full", EVERYBODY, "all"])
def test_unused_parameters(world: World, policy: str) -> None:
    own = torch.full((2,), float(world.rank))
    used, sometimes = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    unused, frozen = torch.nn.Parameter(own.clone()), torch.nn.Parameter(own.clone(), requires_grad=False)
    sync = hvd.PartialReduce(world.size) if policy == "all" else policy
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([used, unused, sometimes, frozen], lr=1.0), sync=sync)
    for _ in range(2):
        take_step(optimizer, lambda: used.sum() + (sometimes.sum() if world.rank == 0 else 0))
    assert used.tolist() == [-2.0] * 2
    assert unused.tolist() == [sum(world.ranks) / world.size if policy == "all" else world.rank] * 2
    assert frozen.tolist() == [world.rank] * 2
    assert torch.allclose(sometimes, torch.full((2,), -2.0 / world.size))


@alone
def test_full_has_the_attributes_of_all(world: World) -> None:
    optimizer = hvd.DistributedOptimizer(MAKERS["momentum"](make_model()), sync="full")
    assert (optimizer.merging_plan, optimizer.last_round, optimizer.last_average) == (None, None, None)


def test_flush_under_way_is_refused(world: World) -> None:
    model, optimizer = wrapped(EVERYBODY)
    last = world.size - 1  # without it no round can end
    if world.rank == last:
        for other in range(last):
            world.wait_for(f"refused {other}")
    loss_of(model, world.rank, 0).backward()
    with pytest.raises(AssertionError, match="flush"):
        optimizer.flush()
    if world.rank != last:
        with pytest.raises(AssertionError, match="load_state_dict"):
            optimizer.load_state_dict(optimizer.state_dict())
        world.tell(f"refused {world.rank}")
    optimizer.step()
    optimizer.flush()


def test_a_refused_load_forgets_nothing(world: World) -> None:
    """Neither what is under way nor what has come already."""
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    sgd = torch.optim.SGD(parameters, lr=1.0)
    optimizer = hvd.DistributedOptimizer(sgd, groups=[[parameter] for parameter in parameters], sync=EVERYBODY)
    parameters[0].sum().backward()
    world.until(lambda: optimizer._exchange.buckets[0].handle.poll(), "the first bucket has come")
    if world.rank > 0:
        world.wait_for("refused")
    parameters[1].sum().backward()
    if world.rank == 0:
        with pytest.raises(AssertionError, match="load_state_dict"):
            optimizer.load_state_dict(optimizer.state_dict())
        world.tell("refused")
    optimizer.step()
    assert [parameter.tolist() for parameter in parameters] == [[-1.0, -1.0]] * 2
    assert optimizer.rounds == 1


def test_gradients_with_a_history(world: World) -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), sync=EVERYBODY)
    for _ in range(2):
        optimizer.zero_grad()
        ((weight - world.rank) ** 2).sum().backward(create_graph=True)
        optimizer.synchronize()
        assert not weight.grad.requires_grad
        with optimizer.skip_synchronize():
            optimizer.step()
    mean = sum(world.ranks) / world.size
    assert torch.allclose(weight, torch.zeros(2), atol=1e-5)  # there and back again
    assert torch.allclose(weight.grad, torch.full((2,), 2 * mean))


class Operations(TorchDispatchMode):
    """Counts PyTorch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[operation.overloadpacket.__name__] += 1
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("scales", [False, True])
def test_what_a_step_costs_on_a_gpu(world: World, scales: bool) -> None:
    """One copy of each gradient, and one wait, with a scaler."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(10)])
    scaler = torch.amp.GradScaler(torch.get_default_device().type, enabled=scales, init_scale=8.0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), groups=2, sync=EVERYBODY, grad_scaler=scaler
    )
    operations = Operations()
    for step in range(4):
        with operations if step > 0 else nullcontext():  # in the first step the ranks compare their parameters
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 3)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    copies = {name: calls for name, calls in operations.calls.items() if name in ("_foreach_copy_", "copy_", "clone")}
    assert copies == {"copy_": 2 * 10 * 3}
    assert operations.calls["_local_scalar_dense"] == 3 * scales, "tensors that the host has read"


def test_policy_from_the_environment(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_full` has what there is by default."""
    monkeypatch.setenv("HOROVOD_PARTIAL_SYNC", "majority")
    settings.cache_clear()
    try:
        model = make_model()
        before = set(hvd.partial_stats())
        optimizer = hvd.DistributedOptimizer(MAKERS["momentum"](model), model.named_parameters())
        train(world, optimizer, model, 3)
        optimizer.flush()
        (name,) = set(hvd.partial_stats()) - before
        assert "Optimizer" in name
        explicit = hvd.DistributedOptimizer(MAKERS["momentum"](model), model.named_parameters(), sync="full")
        assert set(hvd.partial_stats()) - before == {name}  # buckets of earlier optimizers may end meanwhile
        assert explicit.is_horovod_partial
    finally:
        settings.cache_clear()


# --- Replicas --------------------------------------------------------------------------------------------------------


def test_equal_replicas_pass(world: World) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).to(torch.bfloat16)
    torch.manual_seed(world.rank)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
    for _ in range(2):
        take_step(optimizer, lambda: model(torch.randn(4, 2, dtype=torch.bfloat16)).sum())
    hvd.assert_replicas_equal(model, optimizer)  # although the buffers of BatchNorm differ
    hvd.assert_replicas_equal(torch.nn.Module())


def test_replicas_that_differ_are_told_on_every_rank(world: World) -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
    train(world, optimizer, model, 1)
    odd = world.size - 1
    cases = [
        (model[3].bias, rf"1 of \d+ tensors: parameter 3.bias of rank\(s\) {odd} is not that of rank 0"),
        (optimizer.state[model[0].weight]["exp_avg"], rf"state 0.weight exp_avg of rank\(s\) {odd} "),
    ]
    for tensor, text in cases:
        before = tensor.detach().clone()
        if world.rank == odd:
            with torch.no_grad():
                tensor.view(-1)[0] *= 1 + 1e-6
        with pytest.raises(AssertionError, match=text):
            hvd.assert_replicas_equal(model, optimizer)
        with torch.no_grad():
            tensor.copy_(before)
    if world.rank == 0:
        del optimizer.state[model[0].weight]["step"]
    others = ", ".join(str(rank) for rank in world.ranks if rank > 0)
    with pytest.raises(AssertionError, match=rf"state 0.weight step of rank\(s\) {others} is not"):
        hvd.assert_replicas_equal(model, optimizer)
    hvd.assert_replicas_equal(model)


# --- Forms of training, under every policy ----------------------------------------------------------------------------

every_policy = pytest.mark.parametrize("policy", [*GRADIENTS, *KINDS])


@pytest.mark.parametrize("policy", ["full", EVERYBODY, *KINDS])
def test_gradient_clipping(world: World, policy: str) -> None:
    """Horovod's way of writing it works also where there is nothing to synchronize."""
    model, optimizer = wrapped(sync_of(policy))
    for step in range(4):
        optimizer.zero_grad()
        (100 * loss_of(model, world.rank, step)).backward()
        optimizer.synchronize()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5) > 0.5
        assert torch.cat([p.grad.reshape(-1) for p in model.parameters()]).norm() <= 0.5001
        with optimizer.skip_synchronize():
            optimizer.step()
    check_replicas(world, model, optimizer)


@every_policy
def test_closure(world: World, policy: str) -> None:
    model, optimizer = wrapped(sync_of(policy))
    stepped = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(True))
    optimizer.load_state_dict(optimizer.state_dict())  # in which PyTorch looks whether `step` calls the hooks
    calls = 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = loss_of(model, world.rank, calls)
        loss.backward()
        return loss

    for number in (1, 2, 3):
        assert optimizer.step(closure).item() > 0
        assert calls == number
        # A rank that was late applies several rounds, each in a step of its own.
        assert len(stepped) == number or (policy in ("solo", "majority") and len(stepped) > number)
    check_replicas(world, model, optimizer)
    if policy in ("full", EVERYBODY):
        plain = make_model()
        train(world, wrap(plain, sync_of(policy)), plain, 3, first=1)
        # NCCL's order of adding depends on the merging.
        assert weights(model) == pytest.approx(weights(plain), rel=1e-5)


def test_a_closure_that_clips(world: World) -> None:
    """A closure may synchronize by itself, and one that is evaluated twice in a step, as by SAM, is reduced twice."""

    class TwoSteps(torch.optim.SGD):
        def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
            super().step()
            with torch.enable_grad():
                loss = closure()
            super().step()
            return loss

    model = make_model()
    optimizer: Any = hvd.DistributedOptimizer(TwoSteps(model.parameters(), lr=0.1), model.named_parameters())
    norms = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, world.rank, len(norms))
        loss.backward()
        optimizer.synchronize()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        return loss

    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, world.rank, step).backward()
        optimizer.step(closure)
    world.same(weights(model))
    world.same([float(norm) for norm in norms])
    assert (len(norms), optimizer.rounds) == (3, 3)


@every_policy
@pytest.mark.parametrize("when", ["before", "after"])
def test_lr_scheduler(world: World, policy: str, when: str) -> None:
    model = make_model()
    optimizer = MAKERS["momentum"](model)
    if when == "before":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), sync=sync_of(policy))
    if when == "after":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
    rates = []
    for step in range(5):
        train(world, optimizer, model, 1, first=step)
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.1, 0.01, 0.01, 0.001, 0.001])
    if policy in ("full", EVERYBODY):
        assert optimizer.rounds == 5
    if policy not in ("solo", "majority"):  # a late rank has other rates there; `hvd.follow_rounds` would mend that
        check_replicas(world, model, optimizer)


@every_policy
@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad(world: World, policy: str, to_none: bool) -> None:
    model, optimizer = wrapped(sync_of(policy))
    for step in range(3):
        optimizer.zero_grad(set_to_none=to_none)
        grads = [p.grad for p in model.parameters()]
        assert all(g is None for g in grads) if to_none or step == 0 else all(g.abs().max() == 0 for g in grads)
        loss_of(model, world.rank, step).backward()
        if policy in GRADIENTS:  # which are under way
            with pytest.raises(AssertionError, match="zero_grad"):
                optimizer.zero_grad()
        optimizer.step()
    model.zero_grad()
    train(world, optimizer, model, 1, first=3)
    check_replicas(world, model, optimizer)
    if policy in ("full", EVERYBODY):
        assert weights(model) == pytest.approx(reference(world, "momentum", 4), abs=1e-5)


@every_policy
def test_pickling(world: World, policy: str) -> None:
    model, optimizer = wrapped(sync_of(policy), "adam")
    assert isinstance(optimizer, torch.optim.Adam)
    train(world, optimizer, model, 2)
    for copied in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert type(copied) is torch.optim.Adam
        assert copied.defaults == optimizer.defaults
        assert copied.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
    repr(optimizer)
    optimizer.flush()


@alone
@pytest.mark.parametrize("second", ["full", "solo", "group_average"])
def test_wrapping_an_optimizer_of_horovods(world: World, second: str) -> None:
    model = make_model()
    optimizer = horovod.torch.DistributedOptimizer(MAKERS["sgd"](model), model.named_parameters())
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(optimizer, model.named_parameters(), sync=second)


@pytest.mark.parametrize("policy", ["full", "solo", EVERYBODY, *KINDS])
@pytest.mark.parametrize("module", [hvd, horovod.torch], ids=["ours", "horovod"])
@pytest.mark.parametrize("make", ["momentum", "adam"])
@pytest.mark.one_in(5)
def test_broadcast_optimizer_state(world: World, policy: str, module: Any, make: str) -> None:
    model = make_model(world.rank)
    bare = MAKERS[make](model)
    if world.rank == 0:  # only the root has a state, as after loading a checkpoint there
        loss_of(model, 0, 0).backward()
        bare.step()
        bare.zero_grad()
        bare.param_groups[0]["lr"] = 0.05
    average = {"average": ("parameters", "state")} if policy in KINDS else {}
    optimizer = hvd.DistributedOptimizer(bare, model.named_parameters(), sync=sync_of(policy, **average))
    module.broadcast_parameters(model.state_dict(), 0)
    module.broadcast_optimizer_state(optimizer, 0)
    assert optimizer.rounds == 0  # nothing was averaged
    assert optimizer.param_groups[0]["lr"] == 0.05
    world.same((weights(model), state(optimizer, model)))
    train(world, optimizer, model, 2, first=1)
    check_replicas(world, model, optimizer)


@pytest.mark.parametrize("policy", [EVERYBODY, *KINDS])
def test_state_dict_round_trip(world: World, policy: str) -> None:
    """The wrapped optimizer's own state dictionary; what stood in for this rank in groups is forgotten."""
    average = {"average": ("parameters", "state")} if policy in KINDS else {}
    model, optimizer = wrapped(sync_of(policy, **average), "adam")
    train(world, optimizer, model, 3)
    optimizer.flush()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert set(saved[1]) == set(torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))]).state_dict())
    before = world.same((weights(model), state(optimizer, model)))
    train(world, optimizer, model, 3, first=3)
    after = weights(model)
    hvd.barrier()  # which Horovod knows of: a rank that is left over in PartialReduce must not wait for the others
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert (weights(model), state(optimizer, model)) == before
    world.barrier()
    if policy == EVERYBODY:
        train(world, optimizer, model, 3, first=3)
        assert weights(model) == pytest.approx(after, abs=1e-6)
        return
    train(world, optimizer, model, 1, first=6)
    if policy != "weighted":
        assert optimizer.last_round.members == tuple(world.ranks)
        assert not optimizer.last_round.late
    train(world, optimizer, model, 2, first=7)
    optimizer.flush()
    world.same((weights(model), state(optimizer, model)))


@pytest.mark.parametrize("policy", [EVERYBODY, *KINDS])
def test_elastic_state(world: World, policy: str) -> None:
    """`hvd.elastic` saves, restores and broadcasts a wrapped optimizer."""
    model = make_model(world.rank)
    optimizer = wrap(model, sync_of(policy), "adam")
    elastic = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=world.rank)
    elastic.sync()
    elastic.save()
    before = world.same(weights(model))
    assert elastic.step == 0
    train(world, optimizer, model, 1)
    assert weights(model) != before
    elastic.restore()
    assert weights(model) == before
    optimizer.flush()


@pytest.mark.parametrize("policy", KINDS)
def test_gradients_of_one_rank_that_are_not_finite(world: World, policy: str) -> None:
    """Where models are averaged, that rank alone leaves out a step."""
    model = make_model()
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=1024.0, growth_interval=3)
    optimizer = wrap(model, sync_of(policy), grad_scaler=scaler, max_grad_norm=1.0)
    for step in range(8):
        optimizer.zero_grad()
        loss = loss_of(model, world.rank, step)
        if world.rank == 1 and step == 3:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    check_replicas(world, model, optimizer)
    assert torch.isfinite(torch.tensor(weights(model))).all()


def test_unscale_after_synchronize_with_a_scaler_that_does_nothing(world: World) -> None:
    model = make_model()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimizer = hvd.DistributedOptimizer(MAKERS["momentum"](model), sync=EVERYBODY, grad_scaler=scaler)
    scaler.scale(loss_of(model, world.rank, 0)).backward()
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    assert weights(model) == pytest.approx(reference(world, "momentum", 1), abs=1e-5)


@pytest.mark.parametrize("policy", ["full", "solo"])
def test_the_newest_wrapper_of_a_parameter_reduces_it(world: World, policy: str) -> None:
    """A schedule keeps the wrapper of an earlier phase alive. Its hooks would write what the new one reduces."""
    model = torch.nn.Linear(4, 2, bias=False)
    torch.nn.init.zeros_(model.weight)
    options: dict[str, Any] = {"op": hvd.Sum, "sync": policy}
    first = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), **options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(first, 1.0)

    def train(optimizer: Any, steps: int) -> None:
        for _ in range(steps):
            take_step(optimizer, lambda: model(torch.ones(1, 4)).sum())
        optimizer.flush()

    train(first, 3)
    loss = model(torch.ones(1, 4)).sum()
    second = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), **options)
    train(second, 12)
    assert torch.equal(model.weight, torch.full((2, 4), -15.0 * world.size))
    for call in (first.step, first.synchronize):
        with pytest.raises(RuntimeError, match=r"a later hvd\.DistributedOptimizer was made for parameters of this"):
            call()
    assert schedule.optimizer is first
    second.zero_grad()
    loss.backward()  # the new wrapper is in the middle of a step
    with pytest.raises(ValueError, match="whose gradients are under way"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), **options)
    second.step()
    second.flush()
    assert torch.equal(model.weight, torch.full((2, 4), -16.0 * world.size))


@pytest.mark.parametrize("policy", ["full", "solo", "group"])
def test_a_wrapper_that_is_deleted_before_its_first_step(world: World, policy: str) -> None:
    """The program goes on with its own optimizer, so each rank would train alone. A later wrapper makes it good."""
    model = make_model()
    layer = model[0]

    def dropped() -> weakref.ref[Any]:
        return weakref.ref(wrap(model, sync_of(policy)))

    references = [dropped() for _ in range(3)]  # each takes the place of the one before
    loss_of(model, world.rank, 0)  # an evaluation is allowed
    for _ in range(2):
        with pytest.raises(RuntimeError, match="was deleted before it took a step"):
            loss_of(model, world.rank, 0).backward()
    optimizer = wrap(model, sync_of(policy))
    train(world, optimizer, model, 2)
    optimizer.flush()
    references.append(weakref.ref(optimizer))
    del optimizer
    loss_of(model, world.rank, 0).backward()  # what has taken steps may be deleted
    model.zero_grad()
    cycle = [wrap(model, sync_of(policy))]
    cycle.append(cycle)
    references.append(weakref.ref(cycle[0]))
    loss = loss_of(model, world.rank, 0)
    del cycle
    handle = layer.weight.register_hook(lambda _: gc.collect() and None)
    with pytest.raises(RuntimeError, match="was deleted before it took a step"):
        loss.backward()
    handle.remove()
    gc.collect()
    assert [reference() for reference in references] == [None] * 5


class Holder(torch.optim.Optimizer):
    """Holds another optimizer, as Lookahead and SAM do. Some of these do not call the constructor of their base class."""

    def __init__(self, held: torch.optim.Optimizer, *, calls: bool) -> None:
        if calls:
            super().__init__(held.param_groups, held.defaults)
            self.state = held.state
        self.held, self.param_groups = held, held.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.held.step(closure)


@alone
@pytest.mark.parametrize("policy", ["full", "solo", "work_sharing", "group_average:2"])
def test_an_optimizer_that_holds_another_one(world: World, policy: str) -> None:
    model = make_model()
    plain = MAKERS["momentum"](model)
    with pytest.raises(ValueError, match=r"a Holder, has no state and no defaults: let its constructor call"):
        hvd.DistributedOptimizer(Holder(plain, calls=False), sync=policy)
    optimizer = hvd.DistributedOptimizer(Holder(plain, calls=True), sync=policy)
    train(world, optimizer, model, 2)
    assert weights(model) == pytest.approx(reference(world, "momentum", 2), abs=1e-6)
    assert optimizer.state is plain.state


@alone
def test_one_rank_may_delete_a_wrapper(world: World) -> None:
    model = make_model()
    wrap(model, "full")
    loss_of(model, 0, 0).backward()
