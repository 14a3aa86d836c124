"""`hvd.DistributedOptimizer` under policies of models: a local step, then an average of what the ranks have.

Forms of training that all policies have are in `test_optimizer.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from harness.buckets import completed
from harness.matrix import alone, front_end
from harness.torch_training import KINDS, MAKERS, MODELS, loss_of, make_model, state, train, weights, wrap
from harness.world import World

import horovod_partial.torch as hvd
from horovod_partial import _core
from horovod_partial.exchange.wp_sgd import average_converges, average_is_useful

pytestmark = front_end

FOR_EVER = 1e9  # milliseconds: a round with this grace closes when everybody is there
EVERYTHING = ("parameters", "buffers", "state")
policies = pytest.mark.parametrize("policy", MODELS)
kinds = pytest.mark.parametrize("policy", KINDS)


def buffers(model: torch.nn.Module) -> list[float]:
    return torch.cat([b.reshape(-1) for b in model.buffers() if b.dtype.is_floating_point]).tolist()


def bucket_of(optimizer: Any) -> str:
    return optimizer._exchange.name


# --- As one process would ---------------------------------------------------------------------------------------------


class Reference:
    """All ranks' trainings in this process, without Horovod."""

    def __init__(self, world: World, make: str, average: Sequence[str] = ("parameters",)) -> None:
        self.models = [make_model() for _ in world.ranks]
        self.optimizers = [MAKERS[make](model) for model in self.models]
        self.average = average

    def step(self, rank: int, number: int) -> None:
        self.optimizers[rank].zero_grad()
        loss_of(self.models[rank], rank, number).backward()
        self.optimizers[rank].step()

    def step_all(self, number: int) -> None:
        for rank in range(len(self.models)):
            self.step(rank, number)

    def tensors(self, rank: int) -> list[torch.Tensor]:
        model, optimizer = self.models[rank], self.optimizers[rank]
        tensors: list[torch.Tensor] = list(model.parameters())
        if "buffers" in self.average:
            tensors += [buffer for buffer in model.buffers() if buffer.dtype.is_floating_point]
        if "state" in self.average:
            for parameter in model.parameters():
                tensors += [x for x in optimizer.state[parameter].values() if torch.is_tensor(x) and x.dim() > 0]
        return tensors

    @torch.no_grad()
    def mix(self, ranks: Sequence[int], shares: Sequence[float] | None = None) -> None:
        """Give some ranks the weighted mean of what they have."""
        shares = shares or [1 / len(ranks)] * len(ranks)
        for same in zip(*(self.tensors(rank) for rank in ranks), strict=True):
            average = sum(share * tensor.double() for share, tensor in zip(shares, same, strict=True))
            for tensor in same:
                tensor.copy_(average)

    def check(self, rank: int, model: torch.nn.Module) -> None:
        assert weights(model) == pytest.approx(weights(self.models[rank]), abs=1e-5)
        assert buffers(model) == pytest.approx(buffers(self.models[rank]), abs=1e-5)


averages = pytest.mark.parametrize("average", [("parameters",), EVERYTHING], ids=["parameters", "everything"])


@averages
@pytest.mark.parametrize("make", MAKERS)
def test_c5_group_averages_of_ranks_that_are_on_time(world: World, make: str, average: tuple[str, ...]) -> None:
    """WAGMA-SGD, Algorithm 2, as written; after each full round the replicas are equal."""
    schedule, period = hvd.Butterfly(2), 3
    model = make_model()
    policy = hvd.GroupAverage(2, period=period, average=average, grace_ms=FOR_EVER)
    optimizer = wrap(model, policy, make, named_buffers=model.named_buffers())
    reference = Reference(world, make, average)
    for number in range(7):
        train(world, optimizer, model, 1, first=number)
        reference.step_all(number)
        full = number == 0 or (number + 1) % period == 0
        groups = [list(world.ranks)] if full else schedule.groups(number, world.size)
        for members in groups:
            reference.mix(members)
        reference.check(world.rank, model)
        (mine,) = [tuple(members) for members in groups if world.rank in members]
        info = optimizer.last_round
        assert (info.round, info.late, info.members) == (number, False, mine)
        everybody = world.gather((weights(model), buffers(model), state(optimizer, model)))
        parameters, statistics, states = zip(*everybody, strict=True)
        for each in (parameters, statistics, states) if average == EVERYTHING else (parameters,):
            assert all(each[rank] == each[world.rank] for rank in mine)  # bits
        if average != EVERYTHING:
            assert statistics[0] != statistics[1]
        if number:
            assert (parameters[0] == parameters[world.size - 1]) == full
    assert optimizer.rounds == 7


@averages
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("policy", ["ready", "weighted"])
def test_averages_of_all_ranks(world: World, policy: str, make: str, average: tuple[str, ...]) -> None:
    """The model average of local SGD, in every step; equal work has equal weights."""
    model = make_model()
    ready, weighted = hvd.PartialReduce(world.size, average=average), hvd.WeightedAverage(1, 0.5, average=average)
    sync = ready if policy == "ready" else weighted
    optimizer = wrap(model, sync, make, named_buffers=model.named_buffers())
    reference = Reference(world, make, average)
    for number in range(4):
        train(world, optimizer, model, 1, first=number)
        reference.step_all(number)
        reference.mix(world.ranks)
    reference.check(world.rank, model)
    world.same(weights(model))
    assert optimizer.rounds == 4
    if policy == "weighted":
        assert optimizer.last_average.weights == (1 / world.size,) * world.size


@averages
@pytest.mark.parametrize("slow", [0, 1])
def test_weighted_average_of_unequal_work(world: World, slow: int, average: tuple[str, ...]) -> None:
    """A slow rank finishes its step when the fastest has taken all, and counts less."""
    period, contraction = 4, 0.7
    model = make_model()
    policy = hvd.WeightedAverage(period, contraction, average=average)
    optimizer = wrap(model, policy, named_buffers=model.named_buffers())
    reference = Reference(world, "momentum", average)
    taken = 0  # steps of this rank
    taken_of = [0] * world.size
    for number, slow_steps in enumerate((2, 1, 3)):
        steps_of = [slow_steps if rank == slow else period for rank in world.ranks]
        train(world, optimizer, model, steps_of[world.rank] - 1, first=taken)
        assert optimizer.rounds == number
        world.barrier()
        if world.rank == slow:  # in the midst of its step when the others come to the end of theirs
            period_over = f"{bucket_of(optimizer)}.period"
            world.until(lambda: completed(period_over) >= number + 2, "the fastest has taken its steps")  # noqa: B023
        train(world, optimizer, model, 1, first=taken + steps_of[world.rank] - 1)
        taken += steps_of[world.rank]
        shares = _core.contraction_weights(steps_of, contraction)
        for rank in world.ranks:
            for step in range(steps_of[rank]):
                reference.step(rank, taken_of[rank] + step)
            taken_of[rank] += steps_of[rank]
        reference.mix(world.ranks, shares)
        reference.check(world.rank, model)
        world.same(weights(model))
        average_info = world.same(optimizer.last_average)
        assert average_info.steps == tuple(steps_of)
        assert average_info.weights == tuple(shares)
        assert shares[slow] < min(shares[:slow] + shares[slow + 1 :])
        assert average_info.useful == average_is_useful(steps_of, contraction)
        assert average_info.converges == average_converges(steps_of, contraction)
        assert optimizer.rounds == number + 1
    optimizer.flush()


def test_after_a_flush_all_models_are_equally_new(world: World) -> None:
    """Ranks that have averaged more often count no more than others: their models are the same."""
    model = make_model()
    optimizer = wrap(model, hvd.PartialReduce(world.size, weights="staleness"), "sgd")
    train(world, optimizer, model, 6 if world.rank < world.size / 2 else 1)
    optimizer.flush()
    reference = Reference(world, "sgd")
    for one in reference.models:
        one.load_state_dict(model.state_dict())
    reference.step_all(10)
    reference.mix(world.ranks)
    train(world, optimizer, model, 1, first=10)
    assert world.same(optimizer.last_round.work) == (7,) * world.size
    assert weights(model) == pytest.approx(weights(reference.models[0]), abs=1e-5)


@pytest.mark.parametrize("most", [3, 4, 6])
def test_a_flush_weighs_models_by_their_work(world: World, most: int) -> None:
    """WP-SGD's last average is weighted too, and begins a new period; also where a period has ended for one rank only."""
    period, contraction = 4, 0.6
    model = make_model()
    optimizer = wrap(model, hvd.WeightedAverage(period, contraction), "sgd")
    reference = Reference(world, "sgd")

    def train_all(steps_of: Sequence[int], first: int, last_rank: int | None = None) -> None:
        if world.rank != last_rank:
            train(world, optimizer, model, steps_of[world.rank], first)
        world.barrier()
        if world.rank == last_rank:
            train(world, optimizer, model, steps_of[world.rank], first)
        for rank in world.ranks:
            for step in range(first, first + steps_of[rank]):
                reference.step(rank, step)

    def train_one_period(first: int) -> None:
        rounds = optimizer.rounds
        train_all([period - 1] * world.size, first)
        assert optimizer.rounds == rounds
        train_all([1] * world.size, first + period - 1)
        assert optimizer.rounds == rounds + 1
        assert world.same(optimizer.last_average).steps == (period,) * world.size
        reference.mix(world.ranks)

    train_one_period(first=0)
    steps_of = [most if rank == 1 else 1 + (rank == 2) for rank in world.ranks]
    # A rank that still has a step to take when the period of rank 1 ends would average with it.
    train_all(steps_of, first=10, last_rank=1)
    optimizer.flush()
    reference.mix(world.ranks, _core.contraction_weights(steps_of, contraction))
    reference.check(world.rank, model)
    world.same(weights(model))
    train_one_period(first=20)
    reference.check(world.rank, model)
    world.same(weights(model))


# --- Late ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [0, 1])
def test_c3_a_late_rank(world: World, late: int) -> None:
    """WAGMA-SGD, Algorithm 2: its partner averages with its older model, and it with the sum and its own."""
    partner = 1 - late
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    schedule = hvd.Schedule(lambda round, rank: rank // 2, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), sync=hvd.GroupAverage(schedule=schedule, period=None, grace_ms=0)
    )

    def step(gradient: float) -> float:
        optimizer.zero_grad()
        (weight * gradient).sum().backward()
        optimizer.step()
        return -weight.item()

    assert step(10.0**world.rank) == 1111 / 4
    old = 10.0**late
    world.barrier()
    if world.rank == partner:
        mine = 1111 / 4 + 5
        assert step(5.0) == pytest.approx((mine + old) / 2)
        assert not optimizer.last_round.late
    world.until(lambda: completed(bucket_of(optimizer)) >= 2, "the partner's round has ended here")
    if world.rank == late:
        mine = 1111 / 4 + 7
        assert step(7.0) == pytest.approx((1111 / 4 + 5 + old + mine) / 3)
        info = optimizer.last_round
        assert (info.late, info.staleness, info.members) == (True, 1, (0, 1))
    optimizer.flush()
    world.same(weight.item())


@pytest.mark.parametrize("make", ["momentum", "adam"])
@policies
def test_learns(world: World, policy: str, make: str) -> None:
    torch.manual_seed(world.rank)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3, affine=False), torch.nn.Linear(3, 1))
    bare = (
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
        if make == "momentum"
        else torch.optim.Adam(model.parameters(), lr=0.05)
    )
    average = EVERYTHING if make == "adam" else ("parameters", "buffers")
    optimizer = hvd.DistributedOptimizer(
        bare, model.named_parameters(), sync=MODELS[policy](average=average), named_buffers=model.named_buffers()
    )
    hvd.broadcast_parameters(model.state_dict(), 0)
    target = torch.tensor([[1.0, -2.0, 3.0]])
    losses = []
    for _ in range(120):
        x = torch.randn(32, 3)
        optimizer.zero_grad()
        loss = ((model(x) - x @ target.T) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    optimizer.flush()
    assert sum(losses[-20:]) / 20 < 0.25 * losses[0]
    world.same((weights(model), buffers(model)))
    if make == "adam":
        world.same(state(optimizer, model))
        assert all(optimizer.state[p]["step"] == 120 for p in model.parameters())  # a counter stays the rank's own


@policies
def test_flush_averages_over_all_ranks(world: World, policy: str) -> None:
    """The models are equal, and their mean is what it was."""
    model = make_model()
    optimizer = wrap(model, MODELS[policy](average=("parameters", "buffers")), named_buffers=model.named_buffers())
    train(world, optimizer, model, 4)
    hvd.barrier()  # who is through waits here, so that ranks that are left over do not wait for it
    everybody = world.gather((weights(model), buffers(model)))
    for _ in range(3):  # the later ones change nothing
        optimizer.flush()
        optimizer.flush()
        after = world.same((weights(model), buffers(model)))
        for i in range(2):
            means = torch.tensor([mine[i] for mine in everybody], dtype=torch.float64).mean(0)
            assert after[i] == pytest.approx(means.tolist(), abs=1e-6)
    train(world, optimizer, model, 2, first=10)
    optimizer.flush()
    world.same(weights(model))


def test_a_flush_before_there_is_state(world: World) -> None:
    model = make_model(seed=world.rank)
    optimizer = wrap(model, hvd.GroupAverage(2, average=("parameters", "state")))
    for step in range(2):
        optimizer.flush()
        world.same((weights(model), [state["momentum_buffer"].tolist() for state in optimizer.state.values()]))
        train(world, optimizer, model, 2, first=2 * step)
    optimizer.flush()


def test_what_is_not_averaged_stays_the_ranks_own(world: World) -> None:
    model = make_model()
    optimizer = wrap(model, hvd.PartialReduce(world.size), "adam")
    train(world, optimizer, model, 3)
    optimizer.flush()
    world.same(weights(model))
    everybody = world.gather((buffers(model), state(optimizer, model)))
    assert all(everybody[0][i] != everybody[1][i] for i in range(2))


@kinds
def test_backward_passes_per_step(world: World, policy: str) -> None:
    """Gradients accumulate on their rank; a step is an average, however many passes it has."""
    model = make_model()
    optimizer = wrap(model, MODELS[policy](), backward_passes_per_step=2)
    for step in range(4):
        optimizer.zero_grad()
        for part in range(2):
            loss_of(model, world.rank, 2 * step + part).backward()
        optimizer.step()
    optimizer.set_backward_passes_per_step(1)
    train(world, optimizer, model, 2, first=8)
    optimizer.flush()
    world.same(weights(model))


@kinds
def test_hooks_of_a_step_run_once(world: World, policy: str) -> None:
    model = make_model()
    optimizer = wrap(model, MODELS[policy]())
    ran = []
    optimizer.register_step_pre_hook(lambda *arguments: ran.append("before"))
    optimizer.register_step_post_hook(lambda *arguments: ran.append("after"))
    train(world, optimizer, model, 2)
    assert ran == ["before", "after"] * 2
    optimizer.flush()


@policies
def test_statistics(world: World, policy: str) -> None:
    model = make_model()
    optimizer = wrap(model, MODELS[policy]())
    train(world, optimizer, model, 6)
    optimizer.flush()
    stats = hvd.partial_stats()[bucket_of(optimizer)]
    assert sum(stats["closed_by"].values()) == stats["rounds"] >= 1
    assert ("unconnected_windows" in stats) == (world.rank == 0 and policy in ("ready", "staleness"))
    if policy == "weighted":
        assert optimizer.last_average is not None
    else:
        assert optimizer.last_average is None
        assert world.rank in optimizer.last_round.members


# --- State ------------------------------------------------------------------------------------------------------------


@kinds
def test_a_state_that_is_loaded_before_the_first_step(world: World, policy: str) -> None:
    source = make_model()
    bare = MAKERS["adam"](source)
    loss_of(source, 0, 0).backward()
    bare.step()
    model = make_model()
    optimizer = wrap(model, MODELS[policy](average=("parameters", "state")), "adam")
    optimizer.load_state_dict(bare.state_dict())
    assert state(optimizer, model) == state(bare, source)
    train(world, optimizer, model, 3)
    optimizer.flush()
    world.same((weights(model), state(optimizer, model)))


@alone
@kinds
def test_arguments_that_do_not_fit(world: World, policy: str) -> None:
    model = make_model()
    sync = MODELS[policy]()
    unfit: list[dict[str, Any]] = [
        {"compression": hvd.Compression.fp16},
        {"op": hvd.Sum},
        {"op": hvd.Adasum},
        {"gradient_predivide_factor": 2.0},
        {"groups": 2},
        {"op": hvd.Sum, "groups": 2},
        {"merging": hvd.MergedGradients()},
    ]
    for options in unfit:
        with pytest.raises(ValueError, match=rf"{', '.join(options)} cannot be used with \w+\(.*averages models"):
            wrap(model, sync, **options)


@alone
@kinds
def test_buffers_need_their_names(world: World, policy: str) -> None:
    model = make_model()
    sync = MODELS[policy](average=("parameters", "buffers"))
    with pytest.raises(ValueError, match=r"named_buffers=model.named_buffers\(\)"):
        wrap(model, sync)
    wrap(model, sync, named_buffers=model.named_buffers())
    wrap(model, sync, named_buffers=[])  # there may be none


@kinds
@pytest.mark.parametrize("freezes", [True, False])
def test_layers_that_change(world: World, policy: str, freezes: bool) -> None:
    model = make_model()
    model[0].weight.requires_grad_(freezes)
    optimizer = wrap(model, MODELS[policy]())
    train(world, optimizer, model, 4)
    optimizer.flush()
    model[0].weight.requires_grad_(not freezes)
    model[0].weight.grad = None
    with pytest.raises(
        RuntimeError, match=r"0.weight was frozen or unfrozen .* then wrap an optimizer of what is trained"
    ):
        train(world, optimizer, model, 1)
    before = model[0].weight.clone()
    optimizer = wrap(model, MODELS[policy]())
    train(world, optimizer, model, 4)
    optimizer.flush()
    world.same(weights(model))
    assert torch.equal(model[0].weight, before) is freezes


def test_after_a_flush_no_older_model_stands_in(world: World) -> None:
    model = make_model()
    optimizer = wrap(model, hvd.GroupAverage(2, period=None), "sgd")
    train(world, optimizer, model, 1)
    world.barrier()
    if world.rank == 1:
        world.until(lambda: completed(bucket_of(optimizer)) >= 4, "the others' rounds have ended here")
    else:
        train(world, optimizer, model, 3, first=1)
    optimizer.flush()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(4.0)
    if world.rank == 1:
        time.sleep(0.2)
    for _ in range(3):
        optimizer.zero_grad()
        (loss_of(model, world.rank, 0) * 0.0).backward()
        optimizer.step()
        assert set(weights(model)) == {4.0}
    world.barrier()


@kinds
def test_parameter_groups_that_are_added_are_averaged(world: World, policy: str) -> None:
    model = make_model()
    optimizer = wrap(model, MODELS[policy]())
    train(world, optimizer, model, 2)
    added = torch.nn.Parameter(torch.full((1,), float(world.rank)))
    optimizer.add_param_group({"params": [added]})
    train(world, optimizer, model, 2)
    optimizer.flush()
    assert 0 < world.same(added.item()) < world.size - 1


@pytest.mark.parametrize(
    ("own", "others"),
    [
        (hvd.PartialReduce(2), hvd.GroupAverage(2)),
        (hvd.WeightedAverage(2, 0.9), hvd.WeightedAverage(1, 0.9)),  # which is found with the first average
    ],
    ids=["policy", "period"],
)
def test_the_ranks_disagree(world: World, own: Any, others: Any) -> None:
    model = make_model()
    optimizer = wrap(model, own if world.rank == 1 else others)
    with pytest.raises(hvd.HorovodInternalError) as caught:
        train(world, optimizer, model, 2)
    text = world.same(str(caught.value))
    assert all(part in text for part in ("Mismatched sync policies", "rank 0", "rank 1", repr(own), repr(others))), text


@policies
def test_beside_horovods_own_operations(world: World, policy: str) -> None:
    model = make_model()
    optimizer = wrap(model, MODELS[policy]())
    for step in range(6):
        train(world, optimizer, model, 1, first=step)
        assert hvd.allreduce(torch.tensor([step]), name=world.name("full"), op=hvd.Sum).item() == step * world.size
        assert hvd.allgather(torch.tensor([world.rank]), name=world.name("rows")).tolist() == list(world.ranks)
    optimizer.flush()
    world.same(weights(model))
