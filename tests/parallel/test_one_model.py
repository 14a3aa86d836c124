"""After a flush there is one model: parameters and optimizer state have the same bits on every rank.

Whoever was late, however the gradients are clipped, scaled and scheduled, and whoever ended first.
"""

import contextlib
import functools
import itertools
import re
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from harness.buckets import completed
from harness.designs import pairwise
from harness.matrix import front_end
from harness.torch_training import Classifier, take_step
from harness.world import World, delay, paced

import horovod_partial.torch as hvd
from horovod_partial import log
from horovod_partial.torch.operations import runtime

pytestmark = front_end

# All of torch.optim whose step takes no closure and no sparse gradients; each is in the default run once.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "ASGD": {"lr": 0.05},
    "Adadelta": {"lr": 0.5},
    "Adafactor": {"lr": 0.05},
    "Adagrad": {"lr": 0.05},
    "Adam": {"lr": 0.01},
    "AdamW": {"lr": 0.01},
    "Adamax": {"lr": 0.01},
    "Muon": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "momentum": 0.9},
    "Rprop": {"lr": 0.01},
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
}
AXES = {
    "policy": ["solo", "majority", "quorum:1.0"],
    "update": ["plain", "norm", "value", "transform"],
    "precision": ["float32", "float16", "bfloat16"],
    "schedule": [False, True],
    "delays": ["random", "one is slow"],
    "ends_early": [False, True],
    "buckets": [1, 5],
}
SEED = 14
CASES = list(zip(itertools.cycle(OPTIMIZERS), pairwise(AXES, len(OPTIMIZERS), SEED)))


def test_every_optimizer_is_in_the_list(world: World) -> None:
    known = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type)} - {"Optimizer"}
    assert known == {*OPTIMIZERS, "LBFGS", "SparseAdam"}


class Training(Classifier):
    """A small classifier, and everything around it that people have."""

    def __init__(self, world: World, optimizer: str, case: dict[str, Any]) -> None:
        self.case = case
        scaler = None
        if case["precision"] == "float16":
            # It overflows at first, and whenever it has grown.
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_factor=2.0**20, growth_interval=5)
        update: dict[str, Any] = {
            "plain": {},
            "norm": {"max_grad_norm": 0.05},
            "value": {"max_grad_value": 0.01},
            "transform": {"grad_transform": lambda gradients: torch._foreach_sign_(gradients)},
        }[case["update"]]
        super().__init__(
            world,
            lambda parameters: getattr(torch.optim, optimizer)(parameters, **OPTIMIZERS[optimizer]),
            case["policy"],
            scaler=scaler,
            groups=case["buckets"] if case["buckets"] > 1 else None,
            bias=optimizer != "Muon",  # which takes matrices only
            dtype=torch.bfloat16 if case["precision"] == "bfloat16" else torch.float32,
            **update,
        )
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 40)
        if case["schedule"]:
            hvd.follow_rounds(self.schedule)
        self.averages = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.optimizer.register_round_hook(self.average)

    @torch.no_grad()
    def average(self, _: torch.optim.Optimizer) -> None:
        for average, parameter in zip(self.averages, self.model.parameters(), strict=True):
            average.lerp_(parameter, 0.1)

    def step(self) -> torch.Tensor:
        loss = super().step()
        if self.case["schedule"]:
            self.schedule.step()  # as it stands in everybody's loop
        return loss

    def check(self) -> None:
        super().check()
        self.world.same([average.tolist() for average in self.averages])
        self.world.same(self.optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize(("optimizer", "case"), CASES, ids=["-".join(map(str, [n, *c.values()])) for n, c in CASES])
@pytest.mark.one_in(2)
def test_replicas_are_equal(world: World, optimizer: str, case: dict[str, Any]) -> None:
    print(f"pairwise design from seed {SEED}")
    training = Training(world, optimizer, case)
    for _ in paced(world, case["delays"], ends_early=case["ends_early"]):
        training.step()
    training.check()


PLAIN = {name: values[0] for name, values in AXES.items()}


def bucket_of(optimizer: Any) -> str:
    return optimizer._exchange.buckets[0].name


def test_rounds_wait_for_a_rank_with_many_results_before_it(world: World) -> None:
    """A rank that computes for long gets no more than `replay_limit` results before it; then the others wait for it."""
    training = Training(world, "Adam", PLAIN | {"policy": "quorum:3,replay_limit=3,max_staleness=100"})
    training.step()
    world.barrier()
    name = bucket_of(training.optimizer)
    if world.rank == 1:
        world.until(lambda: completed(name) >= 4, "the others' rounds have ended here")
        time.sleep(0.2)  # they would go on
        assert hvd.partial_stats()[name]["missed_rounds"] == 3
        training.step()
        assert hvd.partial_stats()[name]["summed"] == 0
    else:
        for _ in range(6):
            training.step()
    training.check()


def test_a_rank_in_a_flush_follows_the_others(world: World) -> None:
    """One that has ended applies each round that the others take, though these are more than it could keep."""
    training = Training(world, "AdamW", PLAIN | {"policy": "solo:replay_limit=2", "schedule": True})
    for _ in range(2 if world.rank == 0 else 30):
        training.step()
    training.check()
    assert hvd.partial_stats()[bucket_of(training.optimizer)]["summed"] == 0


# Where a rank waits for a collective of Horovod's: before its step, and in the middle of one.
PLACES = ("between steps", "before backward", "after backward")


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_waits_for_horovod_takes_rounds_meanwhile(world: World, place: str) -> None:
    """It applies them one by one, and its model changes behind the wait only; the gradients under way are exact."""
    training = Training(world, "Adam", PLAIN | {"policy": "solo:replay_limit=2"})
    training.step()
    name = world.name("evaluation")
    if world.rank != 0:
        for _ in range(20):
            training.step()
        hvd.allreduce(torch.zeros(1), name=name)
    elif place == "between steps":
        before = [parameter.clone() for parameter in training.model.parameters()]
        hvd.allreduce(torch.zeros(1), name=name)
        assert all(map(torch.equal, before, training.model.parameters()))
        assert not training.optimizer.flushed()
    else:
        loss = training.loss()
        gradients = functools.partial(torch.autograd.grad, loss, list(training.model.parameters()), retain_graph=True)
        exact = gradients()
        if place == "before backward":
            hvd.allreduce(torch.zeros(1), name=name)
            assert all(map(torch.equal, exact, gradients()))
            loss.backward()
        else:
            loss.backward()
            hvd.allreduce(torch.zeros(1), name=name)
        training.optimizer.step()
        training.optimizer.zero_grad()
    training.optimizer.flush()
    assert {of["summed"] for of in hvd.partial_stats().values()} == {0}
    hvd.assert_replicas_equal(training.model, training.optimizer)
    world.barrier()


def test_rounds_that_only_a_copy_of_the_model_has_are_not_flushed(world: World) -> None:
    """But a copy alone leaves nothing to flush: a wait may make one, and find that no round has a result yet."""
    training = Training(world, "Adam", PLAIN | {"policy": "solo:replay_limit=4"})
    training.step()  # everybody is on time for the first round
    exchange = training.optimizer._exchange
    exchange.apply_ahead()
    assert training.optimizer.flushed()
    world.barrier()
    if world.rank == 0:
        training.step()
        world.tell("rank 0 has taken another step")
    else:
        world.wait_for("rank 0 has taken another step")
        world.until(lambda: exchange.family.has_round, "this rank has missed it")
        exchange.apply_ahead()
        assert runtime.unsettled(0).isdisjoint(exchange.family.names)
    assert training.optimizer.flushed() == (world.rank == 0)
    training.check()


class Modal(torch.optim.SGD):
    """Takes no step outside of training, like the optimizers of schedulefree. `fails` says it in no parameter group."""

    fails = ""

    def step(self, closure: Any = None) -> Any:
        if self.fails == "halfway":
            self.param_groups[0]["params"][0].data.add_(1.0)
        if self.fails or not self.param_groups[0]["train_mode"]:
            raise ValueError("no step outside of training")
        return super().step(closure)

    def set(self, mode: str) -> None:
        self.fails = mode if mode in ("at once", "halfway") else ""
        self.param_groups[0]["train_mode"] = mode != "eval"


@pytest.mark.parametrize("mode", ["eval", "at once", "halfway"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.one_in(4)
def test_a_wait_outside_of_training_leaves_rounds_to_the_next_step(world: World, place: str, mode: str) -> None:
    """A step raises nothing in the wait, and no round is lost or applied twice, unless a step has failed halfway."""
    make = lambda parameters: Modal([{"params": list(parameters), "train_mode": True}], lr=0.05, momentum=0.9)
    training = Classifier(world, make, "quorum:3,replay_limit=3,max_staleness=100", groups=2)
    training.step()
    if world.rank != 0:
        for _ in range(8 if mode == "halfway" else 3):
            training.step()
        hvd.allreduce(torch.zeros(1), name=world.name("evaluation"))
    else:
        if place == "after backward":
            training.backward()
        training.optimizer.set(mode)
        hvd.allreduce(torch.zeros(1), name=world.name("evaluation"))
        assert not training.optimizer.flushed()
        training.optimizer.set("train")
        if place == "before backward":
            training.step()
        elif place == "after backward":
            training.optimizer.step()
    with pytest.raises(RuntimeError, match="had parted") if mode == "halfway" else contextlib.nullcontext():
        training.optimizer.flush()
    training.check()


def test_any_flush_applies(world: World) -> None:
    """`hvd.flush` does so for all optimizers of its thread, and of threads that have ended."""
    trainings = [Training(world, "Adam", PLAIN), Training(world, "Adam", PLAIN | {"buckets": 5})]
    rng = world.random()
    rng.seed(rng.randrange(2**32) + world.rank)

    def train() -> None:
        for _ in range(12 if world.rank == 1 else 8):
            for training in trainings:
                delay(rng)
                training.step()

    def check() -> None:
        hvd.flush()
        for training in trainings:
            hvd.assert_replicas_equal(training.model, training.optimizer)
            assert training.optimizer.flushed()

    train()
    check()
    ended = threading.Thread(target=train)
    ended.start()
    ended.join()
    over = threading.Event()
    others = [threading.Thread(target=over.wait, daemon=True) for _ in range(8)]  # one of them gets the ended one's id
    for other in others:
        other.start()
    check()
    over.set()


def test_a_flush_in_a_round_hook(world: World) -> None:
    training = Training(world, "SGD", PLAIN | {"policy": "quorum:1.0"})
    training.optimizer.register_round_hook(lambda _: hvd.flush())
    with pytest.raises(AssertionError, match=f"rank {world.rank}: a flush, a join or the end came within a round hook"):
        training.step()
    world.barrier()


def test_a_flush_tells_of_what_an_idle_thread_has_missed(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """That thread may be about to train on, so only the optimizer's own flush applies it."""
    training = Training(world, "SGD", PLAIN | {"policy": "solo:replay_limit=64"})

    def train() -> None:
        for _ in range(8):
            training.step()
        world.tell(f"{world.rank} is idle")
        for other in world.ranks if world.rank == 1 else ():
            world.wait_for(f"{other} is idle")
            training.step()

    log.logger.addHandler(caplog.handler)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(train).result()
        hvd.flush()
        hvd.flush()
        missed = not training.optimizer.flushed()
        training.optimizer.flush()
    log.logger.removeHandler(caplog.handler)
    assert len([record for record in caplog.records if "another thread" in record.message]) == missed, caplog.text
    assert missed or world.rank == 1
    hvd.assert_replicas_equal(training.model, training.optimizer)


def test_a_rank_that_shuts_down_early(world: World) -> None:
    """Its end goes on applying rounds after a flush of the others, and nobody waits for it."""
    training = Training(world, "Adam", PLAIN | {"policy": "solo:replay_limit=2"})
    for _ in range(3):
        training.step()
    if world.rank != 0:
        for _ in range(3):
            training.step()
        training.optimizer.flush()
        for _ in range(20):
            training.step()
    process_set = training.optimizer.process_set.process_set_id
    runtime._flush(process_set, runtime._appliers_of(process_set), ends=True)  # as `shutdown` does
    hvd.assert_replicas_equal(training.model, training.optimizer)


@pytest.mark.parametrize("last", [True, False])
def test_a_flush_leaves_the_gradients_alone(world: World, last: bool) -> None:
    """What `zero_grad` has left, before or after it, is what the next backward pass adds to."""
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    sync = hvd.Quorum(world.size - 1, grace_ms=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum, sync=sync)

    def step(gradient: float) -> None:
        if not last:
            optimizer.zero_grad()
        (weight * gradient).sum().backward()
        optimizer.step()
        if last:
            optimizer.zero_grad()

    step(1.0)
    world.barrier()
    if world.rank == 1:
        world.until(lambda: completed(bucket_of(optimizer)) >= 2, "the others' round has ended here")
    step(1.0)
    optimizer.flush()
    step(1.0)
    optimizer.flush()
    assert weight.item() == -3.0 * world.size
    world.barrier()


def test_a_flush_beside_a_backward_pass(world: World) -> None:
    """Gradients that are there and have not been applied are neither sent nor lost."""
    training = Training(world, "SGD", PLAIN | {"policy": "quorum:1.0", "buckets": 5})
    training.step()
    training.optimizer.zero_grad()
    training.model[:2](torch.ones(1, 6)).sum().backward()  # reaches the first bucket only in part, or as a whole
    with pytest.raises(AssertionError, match=r"optimizer.flush\(\) was called after loss.backward\(\)"):
        training.optimizer.flush()
    training.optimizer.step()
    training.check()


def test_a_scaler_outlives_its_optimizers(world: World) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    model = torch.nn.Linear(2, 1)
    for _ in range(2):
        bare = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer: Any = hvd.DistributedOptimizer(bare, model.named_parameters(), sync="solo", grad_scaler=scaler)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 2)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.flush()
    assert len(scaler._horovod_partial_followers) == 1
    world.barrier()


def test_sparse_gradients_are_clipped(world: World) -> None:
    model = torch.nn.Embedding(4, 2, sparse=True)
    bare = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(bare, sparse_as_dense=True, sync="solo", max_grad_norm=0.1)
    for _ in range(4):
        take_step(optimizer, lambda: model(torch.tensor([world.rank])).sum())
    optimizer.flush()
    world.same(model.weight.tolist())


# --- By hand


def late_rank(world: World, training: Training, rounds: int) -> None:
    """Rank 1 has missed so many rounds."""
    training.step()
    world.barrier()
    if world.rank == 1:
        world.until(
            lambda: completed(bucket_of(training.optimizer)) >= 1 + rounds, "the others' rounds have ended here"
        )
    else:
        for _ in range(rounds):
            training.step()


@pytest.mark.usefixtures("heals")
@pytest.mark.parametrize("changes", ["clips", "skips", "data", "another"])
def test_clipping_by_hand_raises_where_rounds_were_missed(world: World, changes: str) -> None:
    training = Training(world, "AdamW", PLAIN | {"policy": "quorum:3"})
    late_rank(world, training, 2)
    if world.rank == 1:
        training.backward()
        training.optimizer.synchronize()
        remedy = re.escape("hvd.DistributedOptimizer(..., max_grad_norm=1.0)")
        if changes == "skips":
            remedy = "backward_passes_per_step=.*cookbook/gan.py"
        with pytest.raises(RuntimeError, match=remedy):  # noqa: PT012
            if changes == "skips":
                training.optimizer.zero_grad()
            elif changes == "clips":
                torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.05)
            for parameter in training.model.parameters():
                if changes == "data":
                    parameter.grad.data.mul_(0.5)
                elif changes == "another":
                    parameter.grad = parameter.grad * 0.5
            with training.optimizer.skip_synchronize():
                training.optimizer.step()
        training.optimizer.zero_grad()
        with pytest.warns(UserWarning, match="changed by hand"):
            training.optimizer.flush()
    else:
        training.optimizer.flush()
    world.barrier()


@pytest.mark.usefixtures("heals")
def test_a_result_is_left_out_only_if_no_rank_was_late(world: World) -> None:
    """Otherwise gradients that are left out would come back later, or gradients of other steps would be lost."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), sync="quorum:3")
    for raises in ([], [1], [0, 1, 2, 3]):  # the third round has what was late for the second
        if raises == [1] and world.rank == 1:
            world.barrier()
        weight.sum().backward()
        optimizer.synchronize()
        if raises != [1] or world.rank != 1:
            world.barrier()
        if world.rank in raises:
            with pytest.raises(RuntimeError, match="a rank was late"):
                optimizer.zero_grad()
        optimizer.zero_grad()
        world.barrier()
    assert weight.item() == 0
    optimizer.flush()
    world.barrier()


def test_unscaling_where_a_missed_round_has_overflowed(world: World) -> None:
    """What is not a number differs from itself, and has not been changed by hand for that."""
    training = Training(world, "AdamW", PLAIN | {"policy": "quorum:3", "precision": "float16"})
    late_rank(world, training, 2)
    if world.rank == 1:
        training.backward()
        training.scaler.unscale_(training.optimizer)
        assert any(parameter.grad.isnan().any() for parameter in training.model.parameters())
        training.scaler.step(training.optimizer)
        training.scaler.update()
    training.check()


def test_clipping_gradients_that_travel_raises(world: World) -> None:
    """PyTorch's own order, without `synchronize`: what is clipped is neither this rank's part nor the result."""
    training = Training(world, "SGD", PLAIN | {"policy": "quorum:1.0"})
    training.backward()
    torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.05)
    with pytest.raises(RuntimeError, match=r"changed after backward, while they travelled: 8.bias or another one"):
        training.optimizer.step()
    world.barrier()


# --- Layers that are frozen


def test_layers_are_frozen_and_unfrozen(world: World) -> None:
    training = Training(world, "AdamW", PLAIN)
    first = training.model[0]

    def moves() -> bool:
        before = first.weight.clone()
        for _ in range(4):
            training.step()
        training.check()
        return not torch.equal(before, first.weight)

    assert moves()
    first.requires_grad_(False)
    assert not moves(), "no momentum and no decay either"
    first.requires_grad_(True)
    assert moves()


@pytest.mark.parametrize("policy", ["full", "majority", "solo"])
def test_parameter_groups_are_added(world: World, policy: str) -> None:
    """A layer is trained from some step on, with a rate and a scaler, and the optimizer goes on counting."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 4) for _ in range(2)]
    model = torch.nn.Sequential(*layers)
    layers[1].requires_grad_(False)
    scaler = torch.amp.GradScaler("cpu", growth_interval=4)
    bare = torch.optim.AdamW(layers[0].parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(bare, sync=policy, grad_scaler=scaler, max_grad_norm=1.0)

    def train() -> None:
        for _ in paced(world, "one is slow", ends_early=policy != "full"):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(3, 4)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()

    train()
    optimizer.flush()  # adding a group does it too
    rounds = optimizer.rounds
    before = layers[1].weight.clone()
    layers[1].requires_grad_(True)
    optimizer.add_param_group({"params": list(layers[1].parameters()), "lr": 0.1})
    assert rounds <= optimizer.rounds <= rounds + 1  # that of the flush
    train()
    optimizer.flush()
    assert optimizer.rounds > rounds
    assert not torch.equal(layers[1].weight, before)
    hvd.assert_replicas_equal(model, optimizer)


def test_layers_whose_gradients_would_not_be_reduced(world: World) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    model[0].requires_grad_(False)
    bare = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(bare, model.named_parameters(), sync="quorum:1.0")
    step = lambda: take_step(optimizer, lambda: model(torch.ones(1, 2)).sum())
    step()
    model[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"0.weight needs gradients now"):
        step()
    optimizer.synchronize()
    world.barrier()


def test_adasum_has_no_gradients_to_clip(world: World) -> None:
    bare = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ValueError, match=r"op=hvd\.Adasum reduces no gradients"):
        hvd.DistributedOptimizer(bare, op=hvd.Adasum, max_grad_norm=1.0)


def test_schedules_that_cannot_follow(world: World) -> None:
    model = torch.nn.Linear(2, 1)
    bare = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="make the schedule with the optimizer that"):
        hvd.follow_rounds(torch.optim.lr_scheduler.StepLR(bare, 1))
    optimizer = hvd.DistributedOptimizer(bare, model.named_parameters(), sync="solo")
    with pytest.raises(ValueError, match="ReduceLROnPlateau follows a metric"):
        hvd.follow_rounds(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(ValueError, match="every must be an int, 1 or more, not 0"):
        hvd.follow_rounds(schedule, every=0)
    assert hvd.follow_rounds(schedule) is schedule
    with pytest.raises(ValueError, match="follows rounds already"):
        hvd.follow_rounds(schedule)


@pytest.mark.parametrize("missed", ["replay", "latest"])
@pytest.mark.parametrize("policy", ["solo", "majority", "full", "group_average:2"])
@pytest.mark.one_in(3)
def test_a_schedule_ends_with_the_steps(world: World, policy: str, missed: str) -> None:
    """Ranks that are late make more rounds than steps; a schedule of so many steps takes them all the same."""
    steps = 12
    may_be_late = policy in ("solo", "majority")
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(3)]
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=0.1),
        [(str(number), parameter) for number, parameter in enumerate(parameters)],
        sync=f"{policy}:missed={missed}" if may_be_late else policy,
        groups=[parameters[:1], parameters[1:]] if may_be_late else None,
    )
    # It raises if it is asked for more.
    schedule = hvd.follow_rounds(torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=steps))
    epochs = hvd.follow_rounds(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0), every=4)
    brought = []
    optimizer.register_round_hook(lambda one: brought.append(one.steps_in_round))
    for step in range(steps):
        optimizer.zero_grad()
        if (step + world.rank) % world.size == 0:
            time.sleep(0.02)
        sum(parameter.sum() for parameter in parameters).backward()
        optimizer.step()
        schedule.step()
    has_rounds = policy != "group_average:2"  # its steps count as rounds for hooks, and its averages for `rounds`
    assert missed != "replay" or not has_rounds or len(brought) == optimizer.rounds
    optimizer.flush()
    if missed == "replay":
        assert sum(brought) == pytest.approx(steps)
        assert (schedule.last_epoch, epochs.last_epoch) == (steps, 3)
        assert len(brought) >= steps
        # The flush has one round, which is none to apply where no gradient was left.
        assert not has_rounds or len(brought) in (optimizer.rounds, optimizer.rounds - 1)
    else:  # by this rank's own steps, of which one that has missed nothing is none
        assert schedule.last_epoch <= steps
    world.barrier()


def test_a_schedule_with_ranks_that_end_early(world: World) -> None:
    """It moves with the mean of the ranks' steps, on every rank alike, and goes on where it was loaded."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1), sync="solo")
    schedule = hvd.follow_rounds(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
    for _ in range(2 * (1 + world.rank)):
        parameter.sum().backward()
        optimizer.step()
    optimizer.flush()  # those that have ended follow the others here
    assert schedule.last_epoch == world.size + 1
    saved = schedule.state_dict()
    schedule.load_state_dict(saved)
    for _ in range(2):
        parameter.sum().backward()
        optimizer.step()
    optimizer.flush()
    assert schedule.last_epoch == world.size + 3
    world.barrier()


@pytest.mark.parametrize("policy", ["full", hvd.PartialReduce(4)], ids=str)
def test_other_policies_count_each_step_as_a_round(world: World, policy: Any) -> None:
    """One line of the policy changes, and the rest of the loop stays."""
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    seen = []
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        model.named_parameters(),
        sync=policy,
        max_grad_norm=1.0,
        grad_transform=lambda gradients: torch._foreach_mul_(gradients, 10.0),
    )
    schedule = hvd.follow_rounds(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5), every=2)
    hook = optimizer.register_round_hook(lambda one: seen.append(one.param_groups[0]["lr"]))
    for _ in range(3):
        take_step(optimizer, lambda: model(torch.tensor([[3.0, 4.0]])).sum())
        schedule.step()
    assert seen == [1.0, 0.5, 0.5]
    assert schedule.state_dict()["_steps"] == 3
    expected = torch.ones(2) - torch.tensor([0.6, 0.8]) * 2.5  # the norm of each step is 1, and the rates 1, 1 and 0.5
    assert torch.allclose(model.weight[0], expected, atol=1e-5)
    hook.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.flush()
    optimizer.step()
    assert len(seen) == 3
    world.barrier()
