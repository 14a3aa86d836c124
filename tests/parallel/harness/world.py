"""What a test function gets on every rank: who it is, and a side channel to the others that Horovod knows nothing of.

Arrivals are scripted with it: a rank says that it has done something, another waits to hear it. No test sleeps.
"""

import contextlib
import os
import pickle
import random
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed

from harness.matrix import Setup

# Less than launch.CASE_SECONDS, so that a test that waits for ever says for what.
PATIENCE_SECONDS = 60.0

setup: Setup | None = None  # of this rank's launch; None in the process that pytest was started in
reporter: Any = None
_store: Any = None
_rank = 0


def connect(plan: dict[str, Any], rank: int) -> None:
    """Join the side channel of a launch."""
    global setup, _store, _rank
    environment = tuple((name, value) for name, value in plan["setup"]["environment"])
    setup = Setup(**plan["setup"] | {"environment": environment})
    _rank = rank
    timeout = timedelta(seconds=PATIENCE_SECONDS)
    _store = torch.distributed.TCPStore(
        os.environ["PARTIAL_TEST_HOST"], plan["store_port"], is_master=False, timeout=timeout
    )


def delay(rng: random.Random) -> None:
    """Arrivals in another order in each step; nothing depends on how long this takes."""
    time.sleep(rng.choice((0.0, 0.0, 0.001, 0.004)))


class World:
    """One rank's view of a test."""

    def __init__(self, test: str, setup: Setup, long: bool) -> None:
        self._test = test
        self._gathers = 0
        self.setup = setup
        self.transport = setup.transport
        self.rank = _rank
        self.size = setup.ranks
        self.ranks = range(setup.ranks)
        self.long = long

    def name(self, suffix: str = "tensor") -> str:
        """A name for a tensor or a bucket that no other test uses."""
        return f"{self._test.rpartition('/')[2].replace('.py::', '.')}.{suffix}"

    # --- Side channel ------------------------------------------------------------------------------------------------

    def tell(self, event: str) -> None:
        """Say that something has happened; whoever waits for it goes on."""
        _store.set(f"{self._test}/{event}", b"1")

    def wait_for(self, event: str) -> None:
        """Wait until some rank has said that `event` has happened."""
        try:
            _store.wait([f"{self._test}/{event}"], timedelta(seconds=PATIENCE_SECONDS))
        except torch.distributed.DistStoreError:
            raise TimeoutError(f"rank {self.rank} waited in vain for {event!r}") from None

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, by rank."""
        self._gathers += 1
        keys = [f"{self._test}/gather.{self._gathers}.{rank}" for rank in self.ranks]
        _store.set(keys[self.rank], pickle.dumps(value))
        try:
            _store.wait(keys, timedelta(seconds=PATIENCE_SECONDS))
        except torch.distributed.DistStoreError:
            missing = [rank for rank, key in enumerate(keys) if not _store.check([key])]
            raise TimeoutError(f"rank {self.rank} waited in vain for ranks {missing} in gather or barrier") from None
        return [pickle.loads(_store.get(key)) for key in keys]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.gather(None)

    def same(self, value: Any) -> Any:
        """The value, after checking that every rank has the same."""
        values = self.gather(value)
        assert all(other == values[0] for other in values), f"the ranks differ: {values}"
        return value

    @contextlib.contextmanager
    def turn(self, number: int, label: str = "turn") -> Iterator[None]:
        """Enter when turn `number - 1` is over: with distinct numbers from 0 on, one rank after the other."""
        if number > 0:
            self.wait_for(f"{label}.{number - 1}")
        yield
        self.tell(f"{label}.{number}")

    # --- Help --------------------------------------------------------------------------------------------------------

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until a condition that another thread will make true is true."""
        end = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"rank {self.rank} waited in vain until {what}")
            time.sleep(0.001)

    def random(self, seed: int | None = None) -> random.Random:
        """A generator with the same seed on every rank; the seed is printed, and shown if the test fails."""
        drawn = self.gather(random.SystemRandom().randrange(2**32))[0] if seed is None else seed
        print(f"rank {self.rank}: seed {drawn}")
        return random.Random(drawn)


def paced(world: World, delays: str, *, ends_early: bool) -> Iterator[int]:
    """Twelve steps: with `delays="random"` ranks arrive in any order, otherwise rank 1 is 4 times slower; or it takes half."""
    rng = world.random()
    rng.seed(rng.randrange(2**32) + world.rank)
    slow = world.rank == 1
    for number in range(6 if ends_early and slow else 12):
        if delays == "random":
            delay(rng)
        else:
            time.sleep(0.008 if slow else 0.002)
        yield number


def expected_sum(world: World) -> int:
    """Of what all ranks give in, which is their number counted from 1."""
    return sum(rank + 1 for rank in world.ranks)
