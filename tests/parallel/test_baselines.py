"""The published rivals of `benchmarks/baselines`: whom each averages with, that none loses a step, that none hangs."""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.matrix import process_sets
from harness.world import World

import horovod_partial.torch as hvd

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from baselines import ADPSGD, DPSGD, Baseline, EagerSGD, LocalSGD, PushSum
from baselines.pairs import ranks_of_sets

pytestmark = [process_sets, pytest.mark.full_matrix("gloo")]
RATE = 0.5

Sets = Sequence[hvd.ProcessSet]
IN_STEP: dict[str, Callable[[Any, Sets], Baseline]] = {
    "local_sgd": lambda optimizer, _: LocalSGD(optimizer, 3),
    "d_psgd": DPSGD,
    "push_sum:1": lambda optimizer, sets: PushSum(optimizer, sets, 1),
    "push_sum:2": lambda optimizer, sets: PushSum(optimizer, sets, 2),
    "push_sum:2:overlap": lambda optimizer, sets: PushSum(optimizer, sets, 2, overlap=True),
}


@pytest.fixture
def pairs(world: World | None) -> Iterator[Sets]:
    """A process set for each two of four ranks."""
    if world is None:
        yield []
        return
    sets = [hvd.add_process_set(ranks) for ranks in PushSum.process_sets_of(world.size)]
    yield sets
    world.barrier()
    for one in sets:
        hvd.remove_process_set(one)


class Training:
    """Parameters that begin with another value on each rank. Their gradient is 1 in every step, or 0."""

    def __init__(self, world: World, make: Callable[[Any, Sets], Baseline], sets: Sets, rate: float = 0.0) -> None:
        self._world = world
        self.parameters = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2, 2))]
        torch.nn.utils.vector_to_parameters(self.start(world.rank), self.parameters)
        self.trained = make(torch.optim.SGD(self.parameters, lr=rate), sets)

    @staticmethod
    def start(rank: int) -> torch.Tensor:
        return torch.randn(7, generator=torch.Generator().manual_seed(rank))

    def starts(self) -> torch.Tensor:
        """By rank."""
        return torch.stack([self.start(rank) for rank in self._world.ranks])

    def models(self) -> torch.Tensor:
        """By rank, as they are now."""
        return torch.stack(self._world.gather(torch.nn.utils.parameters_to_vector(self.parameters).detach()))

    def step(self) -> None:
        self.trained.zero_grad()
        for parameter in self.parameters:
            parameter.grad = torch.ones_like(parameter)
        self.trained.step()


def everywhere(model: torch.Tensor) -> torch.Tensor:
    return model.expand(4, -1)


# From whom a rank has models, relative to it, in even and in odd steps.
HOPS = {"d_psgd": [(1, -1), (1, -1)], "push_sum:1": [(1,), (2,)], "push_sum:2": [(1, 2), (1, 2)]}


@pytest.mark.parametrize("name", HOPS)
def test_a_step_takes_the_mean_along_the_hops(world: World, pairs: Sets, name: str) -> None:
    training = Training(world, IN_STEP[name], pairs)
    expected = training.starts()
    for step in range(20):
        training.step()
        hops = HOPS[name][step % 2]
        expected = (expected + sum(expected.roll(hop, 0) for hop in hops)) / (1 + len(hops))
        torch.testing.assert_close(training.models(), expected)
        if name != "d_psgd":
            assert sum(world.gather(training.trained.weight)) == pytest.approx(world.size)
    torch.testing.assert_close(training.models(), everywhere(training.starts().mean(0)))


def test_push_sum_with_overlap_adds_the_messages_of_the_step_before(world: World, pairs: Sets) -> None:
    training = Training(world, lambda optimizer, sets: PushSum(optimizer, sets, 1, overlap=True), pairs)
    sums, weights = training.starts(), torch.ones(4, 1)
    sent = [torch.zeros(4, 7), torch.zeros(4, 1)]  # shares of the step before, by rank of the receiver
    for step in range(100):
        training.step()
        hop = 2 ** (step % 2)
        shares = [sums / 2, weights / 2]
        sums, weights = (share + arrived for share, arrived in zip(shares, sent, strict=True))
        sent = [share.roll(hop, 0) for share in shares]
        torch.testing.assert_close(training.models(), sums / weights)
    torch.testing.assert_close(training.models(), everywhere(training.starts().mean(0)))
    training.trained.flush()
    torch.testing.assert_close(training.models(), everywhere(training.starts().mean(0)))


def test_push_sum_with_unequal_weights(world: World, pairs: Sets) -> None:
    """In this graph they stay 1; where they do not, models must still agree on the sum by the weight of all."""
    training = Training(world, lambda optimizer, sets: PushSum(optimizer, sets, 1), pairs)
    for _ in range(2):
        training.step()  # with so many, everybody has the mean
    training.trained._sum_and_weight[-1] = 1 + world.rank
    for _ in range(2):
        training.step()
    assert sum(world.gather(training.trained.weight)) == pytest.approx(1 + 2 + 3 + 4)
    torch.testing.assert_close(training.models(), everywhere(training.starts().sum(0) / (1 + 2 + 3 + 4)))


def test_ad_psgd_comes_to_agree(world: World, pairs: Sets) -> None:
    training = Training(world, ADPSGD, pairs)
    for _ in range(40):
        training.step()
        world.barrier()
    mean = everywhere(training.starts().mean(0))
    torch.testing.assert_close(training.models(), mean, atol=1e-3, rtol=0)
    training.trained.flush()
    torch.testing.assert_close(training.models(), mean)


def test_ad_psgd_answers_between_steps(world: World, pairs: Sets) -> None:
    """Passive ranks have begun, and take their second step when all active ones have taken eleven."""
    training = Training(world, ADPSGD, pairs)
    training.step()
    if world.rank % 2:
        for rank in (0, 2):
            world.wait_for(f"{rank} has stepped")
    else:
        for _ in range(10):
            training.step()
        world.tell(f"{world.rank} has stepped")
    training.step()
    training.trained.flush()
    torch.testing.assert_close(training.models(), everywhere(training.starts().mean(0)))


def test_ad_psgd_with_unequal_steps(world: World, pairs: Sets) -> None:
    """Whoever ends first, with or without a step: nobody hangs, and all steps are in the mean. It goes on after a flush."""
    training = Training(world, ADPSGD, pairs, RATE)
    expected = training.starts().mean(0)
    for steps in ([3, 0, 7, 12], [0, 9, 2, 1], [0, 0, 0, 0]):
        for _ in range(steps[world.rank]):
            training.step()
        training.trained.flush()
        expected = expected - RATE * sum(steps) / world.size
        torch.testing.assert_close(training.models(), everywhere(expected))


@pytest.mark.parametrize("name", IN_STEP)
def test_no_step_is_lost(world: World, pairs: Sets, name: str) -> None:
    training = Training(world, IN_STEP[name], pairs, RATE)
    expected = training.starts().mean(0)
    for steps in (5, 1, 0, 4):
        for _ in range(steps):
            training.step()
        training.trained.flush()
        expected = expected - RATE * steps
        torch.testing.assert_close(training.models(), everywhere(expected))


@pytest.mark.parametrize("name", ["d_psgd", "push_sum:1", "push_sum:2:overlap"])
def test_only_neighbours_are_waited_for(world: World, pairs: Sets, name: str) -> None:
    """Rank 3 takes its first step when all others have taken theirs that need nothing of it."""
    training = Training(world, IN_STEP[name], pairs)
    # On a ring rank 1 is no neighbour of rank 3. Along the graph rank 3 sends to rank 0 in the first step. With overlap no
    # rank waits in the first step.
    free = {"d_psgd": [1], "push_sum:1": [1, 2], "push_sum:2:overlap": [0, 1, 2]}[name]
    if world.rank == 3:
        for rank in free:
            world.wait_for(f"{rank} has stepped")
    training.step()
    world.tell(f"{world.rank} has stepped")
    training.trained.flush()


def test_local_sgd_averages_every_third_step(world: World) -> None:
    training = Training(world, IN_STEP["local_sgd"], [])
    for full in (False, False, True):
        torch.testing.assert_close(training.models(), training.starts())
        training.step()
        assert training.trained.was_full == full
    torch.testing.assert_close(training.models(), everywhere(training.starts().mean(0)))


def eager_sgd(world: World, collective: str, sync_every: int) -> Callable[[Any, Sets], Baseline]:
    def make(optimizer: Any, _: Sets) -> Baseline:
        parameters = [(f"{world.name()}.{n}", p) for n, p in enumerate(optimizer.param_groups[0]["params"])]
        return EagerSGD(optimizer, parameters, collective, sync_every=sync_every)

    return make


@pytest.mark.parametrize("collective", ["solo", "majority"])
def test_eager_sgd(world: World, collective: str) -> None:
    """Its first step averages the models; after the last, replicas may differ, and after the flush they do not."""

    training = Training(world, eager_sgd(world, collective, sync_every=100), [])
    training.step()
    torch.testing.assert_close(training.models(), everywhere(training.starts().mean(0)))
    for _ in range(world.rank):
        training.step()
    training.trained.flush()
    torch.testing.assert_close(training.models(), everywhere(training.starts().mean(0)))


@pytest.mark.parametrize("collective", ["solo", "majority"])
def test_eager_sgd_averages_again(world: World, collective: str) -> None:
    """Every rank comes to each average, however its rounds went."""

    training = Training(world, eager_sgd(world, collective, sync_every=1), [])
    for _ in range(3):
        torch.nn.utils.vector_to_parameters(training.start(world.rank), training.parameters)
        training.step()
        torch.testing.assert_close(training.models(), everywhere(training.starts().mean(0)))
    training.trained.flush()


@pytest.mark.parametrize("needed", [DPSGD.process_sets_of, ADPSGD.process_sets_of, PushSum.process_sets_of])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_sets_without_a_common_rank_come_together(needed: Callable[[int], list[list[int]]], ranks: int) -> None:
    sets = needed(ranks)
    assert len({tuple(one) for one in sets}) == len(sets)
    assert bool(sets) == (ranks > 2)
    for first in range(0, len(sets), ranks // 2):
        together = sets[first : first + ranks // 2]
        assert len({rank for one in together for rank in one}) == 2 * len(together)


def test_pairs_are_made_once() -> None:
    assert ranks_of_sets([(0, 1), (1, 0), (1, 2), (2, 3)], 4) == [[0, 1], [2, 3], [1, 2]]
