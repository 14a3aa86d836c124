"""Averages of models in groups of ranks: one rank's model, and what must have become of all."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from harness.fronts import Arrival, Front
from harness.script import Script
from harness.world import World
from horovod_partial.exchange.rounds import RoundInfo
from horovod_partial.policies import Butterfly, GroupAverage, PartialReduce, Schedule, WeightedAverage

FOR_EVER = 1e9  # milliseconds: a round with this grace closes when everybody is there


def model(rank: int, shape: tuple[int, ...] = (37,)) -> np.ndarray:
    """A model of random numbers, which every rank can make."""
    return np.random.default_rng(rank).normal(size=shape)


def ring(ranks: int) -> Schedule:
    """Pairs of neighbours on a ring of so many ranks, the next ones in each round."""
    return Schedule(lambda round, rank: (rank - round) % ranks // 2, ranks)


def group_of(rank: int, groups: list[list[int]]) -> tuple[int, ...]:
    """The group of a rank."""
    (mine,) = [members for members in groups if rank in members]
    return tuple(mine)


def everybody_averages(world: World, average: tuple[str, ...]) -> dict[str, Any]:
    """A policy of each kind under which all ranks average in every step."""
    return {
        "group": GroupAverage(schedule=Butterfly(world.size + 1), average=average, grace_ms=FOR_EVER),
        "ready": PartialReduce(world.size, average=average),
        "weighted": WeightedAverage(1, 0.5, average=average),
    }


class Groups(Script):
    """Averages of one number in groups, driven step by step. The options are those of the policy."""

    def __init__(self, front: Front, world: World, **options: Any) -> None:
        super().__init__(front, world, "average", policy=GroupAverage(**({"period": None} | options)))


def softmax(steps: Sequence[int], contraction: float) -> np.ndarray:
    """WP-SGD's weights, to the last bits."""
    logits = (max(steps) - np.array(steps, dtype=np.float64)) * np.log(contraction)
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


class Models:
    """One rank's model and what became of it under `PartialReduce`, in a job without gradients."""

    def __init__(self, front: Front, world: World, name: str = "model", **options: Any) -> None:
        self.front = front
        self.world = world
        self.name = world.name(name)
        self.operation = front.bind("average", policy=PartialReduce(**({"size": 2} | options)), name=self.name)
        self.model = model(world.rank)
        self.calls: list[tuple[RoundInfo, np.ndarray, np.ndarray]] = []

    def start(self) -> Arrival:
        return self.operation(self.front.tensor(self.model, "float64"))

    def end(self, arrival: Arrival) -> RoundInfo:
        result, info = arrival.end()
        assert not info.late
        assert self.world.rank in info.members
        assert info.fresh == info.gradients == len(info.members)
        self.calls.append((info, self.model, self.front.array(result)))
        self.model = self.front.array(result)
        return info

    def reduce(self) -> RoundInfo:
        return self.end(self.start())

    def together(self, *ranks: int) -> RoundInfo | None:
        """Let these ranks arrive and nobody else: they are one group."""
        info = self.reduce() if self.world.rank in ranks else None
        assert info is None or info.members == tuple(sorted(ranks))
        self.world.barrier()
        return info

    def check(self, weights: Callable[[Sequence[int]], Sequence[float]] | None = None) -> None:
        """Every call was in one group, alone or with those that say so too, and got the weighted mean of its inputs.

        E4: with equal weights the mean of all models is what it was.
        """
        groups: dict[Any, dict[int, Any]] = defaultdict(dict)
        for rank, calls in enumerate(self.world.gather(self.calls)):
            for info, given, got in calls:
                assert rank not in groups[info.round, info.members]
                groups[info.round, info.members][rank] = (given, got, info.work)
        for (number, members), by_rank in groups.items():
            assert tuple(sorted(by_rank)) == members, f"round {number}"
            shares = weights(by_rank[members[0]][2]) if weights else [1 / len(members)] * len(members)
            expected = sum(share * by_rank[rank][0] for share, rank in zip(shares, members, strict=True))
            results = [got for _, got, _ in by_rank.values()]
            assert all(np.array_equal(got, results[0]) for got in results), f"round {number} of {members}"
            assert np.allclose(results[0], expected, atol=1e-12), f"round {number} of {members}"
        rounds = sorted({number for number, _ in groups})
        assert rounds == list(range(len(rounds)))
        if weights is None:
            models = self.world.gather(self.model), [model(rank) for rank in self.world.ranks]
            assert np.allclose(*(np.mean(each, 0) for each in models), atol=1e-12)
