"""What every `DistributedOptimizer` does under policies of models: a local step, then an average of what the ranks have.

What loops of one framework alone have is in `test_model_optimizer.py` and `test_keras*.py`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from harness.matrix import alone
from harness.models import FOR_EVER, everybody_averages
from harness.trainers import Trainer, linear, near, network, optimizers
from harness.world import World

from horovod_partial import _core
from horovod_partial.exchange.wp_sgd import average_converges, average_is_useful
from horovod_partial.policies import Butterfly, GroupAverage, PartialReduce, WeightedAverage

pytestmark = optimizers
KINDS = {"group": GroupAverage(2), "ready": PartialReduce(2), "weighted": WeightedAverage(2, 0.9)}
kinds = pytest.mark.parametrize("policy", KINDS)


class ByHand:
    """The training of a rank without Horovod, whose model is averaged by hand."""

    def __init__(self, trainer: Trainer, world: World, make: str = "momentum") -> None:
        self.world = world
        self.training = trainer.training(world, None, make)

    def average(self, ranks: Sequence[int], shares: Sequence[float] | None = None) -> list[float]:
        """Give this rank the weighted mean of what these ranks have, and return it. All ranks call this together."""
        shares = shares or [1 / len(ranks)] * len(ranks)
        everybody = self.world.gather(self.training.values())
        models = [[np.array(values) for values in everybody[rank]] for rank in ranks]
        means = [np.tensordot(shares, same, 1) for same in zip(*models, strict=True)]
        self.training.assign(means)
        return self.training.weights()


@pytest.mark.parametrize("make", ["momentum", "Adam"])
def test_c5_group_averages_of_ranks_that_are_on_time(trainer: Trainer, world: World, make: str) -> None:
    """WAGMA-SGD, Algorithm 2, as written; after each full round the replicas are equal."""
    schedule, period = Butterfly(2), 3
    one = trainer.training(world, GroupAverage(2, period=period, grace_ms=FOR_EVER), make)
    by_hand = ByHand(trainer, world, make)
    for number in range(7):
        one.train(1, first=number)
        by_hand.training.train(1, first=number)
        full = number == 0 or (number + 1) % period == 0
        groups = [list(world.ranks)] if full else schedule.groups(number, world.size)
        (mine,) = [members for members in groups if world.rank in members]
        assert one.weights() == near(by_hand.average(mine))
        everybody = world.gather(one.weights())
        assert all(everybody[rank] == everybody[world.rank] for rank in mine)  # bits
        if number and world.size > 2:
            assert (everybody[0] == everybody[world.size - 1]) == full
        if trainer.module == "torch":
            info = one.optimizer.last_round
            assert (info.round, info.late, info.members) == (number, False, tuple(mine))
    assert one.optimizer.rounds == 7


@kinds
def test_averages_of_all_ranks(trainer: Trainer, world: World, policy: str) -> None:
    """The model average of local SGD, in every step; equal work has equal weights. State stays the rank's own."""
    one = trainer.training(world, everybody_averages(world, ("parameters",))[policy])
    by_hand = ByHand(trainer, world)
    for number in range(3):
        one.train(1, first=number)
        by_hand.training.train(1, first=number)
        assert world.same(one.weights()) == near(by_hand.average(world.ranks))
    assert one.state() == near(by_hand.training.state())
    states = world.gather(one.state())
    assert states[0] != states[1]
    assert one.optimizer.rounds == 3


@kinds
def test_averages_of_the_state_too(trainer: Trainer, world: World, policy: str) -> None:
    """Models and momenta are linear in the gradients, so it is as if gradients had been averaged."""
    one = trainer.training(world, everybody_averages(world, ("parameters", "state"))[policy])
    one.train(3)
    expected = trainer.training(world, None).train_alone(3)
    assert world.same(one.weights()) == near(expected.weights())
    assert world.same(one.state()) == near(expected.state())


@kinds
def test_an_average_after_accumulated_gradients(trainer: Trainer, world: World, policy: str) -> None:
    sync = everybody_averages(world, ("parameters",))[policy]
    one = trainer.training(world, sync, "SGD", passes=2)
    one.train(4)
    assert one.optimizer.rounds == 2
    scaled = lambda *inputs: 2.0 * network(*inputs)  # gradients are summed over the passes
    expected = trainer.training(world, None, "SGD", loss=scaled).train_alone(2, passes=2)
    assert world.same(one.weights()) == near(expected.weights())


@kinds
def test_dtypes(trainer: Trainer, world: World, policy: str) -> None:
    sync = everybody_averages(world, ("parameters",))[policy]
    one = trainer.training(world, sync, "unit", linear, [np.zeros(3)] * 3, ["bfloat16", "float16", "float64"])
    for _ in range(2):
        one.step(*[np.full(3, world.rank + 1.0)] * 3)
    mean = sum(rank + 1 for rank in world.ranks) / world.size
    assert one.weights() == pytest.approx([-2 * mean] * 9, rel=1e-2)


@pytest.mark.parametrize("slow", [0, 1])
def test_weighted_average_of_unequal_work(trainer: Trainer, world: World, slow: int) -> None:
    """A slow rank finishes its step when the fastest has taken all, and counts less."""
    period, contraction = 4, 0.7
    one = trainer.training(world, WeightedAverage(period, contraction))
    by_hand = ByHand(trainer, world)
    for number, slow_steps in enumerate((2, 1, 3)):
        steps_of = [slow_steps if rank == slow else period for rank in world.ranks]
        steps, first = steps_of[world.rank], period * number
        one.train(steps - 1, first)
        assert one.optimizer.rounds == number
        world.barrier()
        if world.rank == slow:  # in the midst of its step when the others come to the end of theirs
            signal = trainer.averages(one.optimizer).signal_name
            world.until(lambda n=number, s=signal: trainer.completed(s) >= n + 2, "the fastest has taken its steps")
        one.train(1, first + steps - 1)
        by_hand.training.train(steps, first)
        shares = _core.contraction_weights(steps_of, contraction)
        assert shares[slow] < min(shares[:slow] + shares[slow + 1 :])
        assert world.same(one.weights()) == near(by_hand.average(world.ranks, shares))
        assert one.optimizer.rounds == number + 1
        if trainer.module == "torch":
            info = world.same(one.optimizer.last_average)
            assert (info.steps, info.weights) == (tuple(steps_of), tuple(shares))
            assert info.useful == average_is_useful(steps_of, contraction)
            assert info.converges == average_converges(steps_of, contraction)
    one.optimizer.flush()


@pytest.mark.parametrize("most", [3, 4, 6])
def test_a_flush_weighs_models_by_their_work(trainer: Trainer, world: World, most: int) -> None:
    """WP-SGD's last average is weighted too, and begins a new period; also where a period has ended for one rank only."""
    period, contraction = 4, 0.6
    one = trainer.training(world, WeightedAverage(period, contraction), "SGD")
    by_hand = ByHand(trainer, world, "SGD")

    def train_one_period(first: int) -> None:
        rounds = one.optimizer.rounds
        one.train(period - 1, first)
        world.barrier()
        assert one.optimizer.rounds == rounds
        one.train(1, first + period - 1)
        assert one.optimizer.rounds == rounds + 1
        by_hand.training.train(period, first)
        assert world.same(one.weights()) == near(by_hand.average(world.ranks))

    train_one_period(first=0)
    steps_of = [most if rank == 1 else 1 + (rank == 2) for rank in world.ranks]
    # A rank that still has a step to take when the period of rank 1 ends would average with it.
    if world.rank != 1:
        one.train(steps_of[world.rank], first=10)
    world.barrier()
    if world.rank == 1:
        one.train(steps_of[world.rank], first=10)
    one.optimizer.flush()
    by_hand.training.train(steps_of[world.rank], first=10)
    shares = _core.contraction_weights(steps_of, contraction)
    assert world.same(one.weights()) == near(by_hand.average(world.ranks, shares))
    train_one_period(first=20)


def test_after_a_flush_all_models_are_equally_new(trainer: Trainer, world: World) -> None:
    """Ranks that have averaged more often count no more than others: their models are the same."""
    one = trainer.training(world, PartialReduce(world.size, weights="staleness"), "SGD")
    one.train(6 if world.rank < world.size / 2 else 1)
    one.optimizer.flush()
    by_hand = ByHand(trainer, world, "SGD")
    by_hand.training.assign(one.values())
    by_hand.training.train(1, first=10)
    one.train(1, first=10)
    assert world.same(one.weights()) == near(by_hand.average(world.ranks))
    one.optimizer.flush()


@alone
@kinds
def test_arguments_that_do_not_fit(trainer: Trainer, world: World, policy: str) -> None:
    hvd = trainer.hvd
    cases: list[dict[str, Any]] = [
        {"compression": hvd.Compression.fp16},
        {"op": hvd.Sum},
        {"gradient_predivide_factor": 2.0},
        {"groups": 2},
        {"op": hvd.Sum, "groups": 2},
    ]
    for options in cases:
        with pytest.raises(ValueError, match=rf"{', '.join(options)} cannot be used with \w+\(.*averages models"):
            trainer.wrap(sync=KINDS[policy], **options)
