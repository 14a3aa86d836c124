"""Rounds under a script: who arrives when is fixed by events between the ranks, and every figure is known beforehand."""

from typing import Any

import pytest

from harness.fronts import Arrival, Front
from harness.world import World
from horovod_partial.exchange.rounds import RoundInfo
from horovod_partial.policies import Quorum


class Script:
    """A bucket of one number, driven step by step. Sums, unless stated: each contribution can be told from the result."""

    def __init__(self, front: Front, world: World, kind: str = "partial_allreduce", **options: Any) -> None:
        self.front = front
        self.world = world
        self.options = {"name": world.name(), **({} if kind == "average" else {"op": front.hvd.Sum}), **options}
        self.name = self.options["name"]
        self.operation = front.bind(kind, **self.options)

    def start(self, number: float) -> Arrival:
        return self.operation(self.front.tensor([number], "float64"))

    def end(self, arrival: Arrival) -> tuple[float, RoundInfo]:
        result, info = arrival.end()
        return self.front.array(result).item(), info

    def arrive(self, number: float) -> tuple[float, RoundInfo]:
        return self.end(self.start(number))

    def first(self, number: float = 0.0) -> None:
        """Round 0, which is always full."""
        total = sum(self.world.gather(number))
        result, info = self.arrive(number)
        assert result == (total if self.options.get("op") == self.front.hvd.Sum else total / self.world.size)
        assert (info.round, info.late, info.fresh, info.members) == (0, False, self.world.size, tuple(self.world.ranks))
        self.world.barrier()

    def completed(self, rounds: int) -> None:
        """Wait until this rank has seen a number of rounds end."""
        self.world.until(lambda: self.front.completed(self.name) >= rounds, f"round {rounds - 1} has ended here")

    def must_wait(self, arrival: Arrival | None) -> None:
        """An arrival has no result yet, although the coordinator has had its chance to close the round."""
        self.front.fence(self.world)
        assert arrival is None or not arrival.done()
        self.world.barrier()


def all_but(rank: int, world: World, **options: Any) -> Quorum:
    """The policy that closes a round as soon as all ranks but one are there."""
    assert 0 <= rank < world.size
    return Quorum(world.size - 1, **options)


def value(rank: int, step: int = 0) -> int:
    """A contribution that is a digit of its own in a sum."""
    return 10**rank * (step + 1)


def total(world: World, *, without: int | None = None, step: int = 0) -> int:
    """The sum of all ranks' values."""
    return sum(value(rank, step) for rank in world.ranks if rank != without)


def same_error(
    front: Front, world: World, tensor: Any, *parts: str, kind: str = "partial_allreduce", **options: Any
) -> None:
    """Every rank gets the same error, with these words in it, and the job goes on."""
    with pytest.raises(front.disagreement) as caught:
        front.run(tensor, kind, name=world.name(), **options)
    text = front.message(caught.value)
    assert all(part in text for part in parts), text
    world.same(text)
    front.check_that_the_job_goes_on(world)
    # The name is free again.
    again = {"name": world.name(), "op": front.hvd.Sum, "sync": "solo"}
    assert front.reduce([1.0] * 3, **again) == [world.size] * 3
