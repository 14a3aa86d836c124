"""The round protocol as a stateful property test: the code of a job, with the order of events drawn by hypothesis.

Every run ends with a flush; then I1 (exactly once) must hold on every rank, whatever came before. I3 (quorum) and I4
(staleness) are checked at each closing, I6 (no hang) by the flush coming to its end.
"""

from __future__ import annotations

from collections import defaultdict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from horovod_partial import _core

BUCKETS = ("a", "b")
MAX_STALENESS = 2
# More cycles than any flush can need: each delivers at least one outstanding arrival, or ends a flush.
ENOUGH_CYCLES = 40


class Job(RuleBasedStateMachine):
    """Ranks arrive, wait, are blocked; cycles negotiate; callbacks come in any order."""

    missed = "sum"

    @initialize(size=st.integers(2, 4), quorum=st.integers(1, 4), by_initiator=st.booleans(), seed=st.integers(0, 9))
    def start(self, size: int, quorum: int, by_initiator: bool, seed: int) -> None:
        self.size = size
        self.quorum = 1 if by_initiator else min(quorum, size)
        self.by_initiator = by_initiator
        policy = _core.Policy(
            rule="initiator" if by_initiator else "quorum",
            quorum=self.quorum,
            seed=seed,
            max_staleness=MAX_STALENESS,
            grace_seconds=0.0,
        )
        self.job = _core.Simulation(size, policy, self.missed)
        self.now = 0.0
        self.values = 0
        self.submitted: dict[str, float] = defaultdict(float)
        self.delivered: dict[tuple[int, str], float] = defaultdict(float)
        self.arrivals = 0
        self.gradients = 0
        self.waiting: set[tuple[int, str]] = set()
        self.running: set[tuple[int, str]] = set()
        self.blocked: set[int] = set()
        self.flushing: set[int] = set()
        self.flushed = False
        self.rounds: dict[str, int] = defaultdict(int)
        self.last: dict[tuple[int, str], int] = {}

    # --- What ranks do -----------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        free = [(rank, name) for rank in range(self.size) for name in BUCKETS if (rank, name) not in self.waiting]
        free = [(rank, name) for rank, name in free if rank not in self.blocked]
        if free:
            self.submit(*data.draw(st.sampled_from(free)))

    def submit(self, rank: int, name: str) -> None:
        self.values += 1
        outcome, results = self.job.arrive(rank, name, float(self.values))
        assert outcome in ("on_time", "late", "waiting")
        self.arrivals += 1
        self.submitted[name] += self.values
        if outcome == "late":
            self.delivered[rank, name] += sum(results)
        else:
            self.waiting.add((rank, name))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def block(self, data: st.DataObject) -> None:
        """A rank waits for one of its arrivals, longer than the threshold."""
        rank, _ = data.draw(st.sampled_from(sorted(self.waiting)))
        self.blocked.add(rank)
        self.job.set_blocked(rank, True)

    # --- What the library below does ---------------------------------------------------------------------------------

    @precondition(lambda self: not self.running)
    @rule()
    def cycle(self) -> None:
        self.now += 1.0
        for name, number, reason, contributions in self.job.cycle(self.now):
            assert number == self.rounds[name], "rounds of a bucket come in order"
            self.rounds[name] += 1
            self.check_closing(name, number, reason, contributions)
            self.running |= {(rank, name) for rank in range(self.size)}
            if reason in ("flush", "end"):
                self.flushing.clear()
                self.flushed = True

    def check_closing(self, name: str, number: int, reason: str, contributions: list[tuple[int, bool]]) -> None:
        fresh = sum(is_fresh for _, is_fresh in contributions)
        self.gradients += sum(gradients for gradients, _ in contributions)
        if reason in ("first", "everybody"):
            assert fresh == self.size
        if reason == "quorum":
            assert fresh >= self.quorum  # I3
        for rank, (gradients, _) in enumerate(contributions):
            if gradients > 0:
                self.last[rank, name] = number
            elif reason == "quorum" and rank not in self.blocked | self.flushing:
                assert number - self.last[rank, name] <= MAX_STALENESS  # I4

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.end_round(*data.draw(st.sampled_from(sorted(self.running))))

    def end_round(self, rank: int, name: str) -> None:
        self.running.discard((rank, name))
        results = self.job.finish(rank, name)
        assert bool(results) == ((rank, name) in self.waiting)
        self.delivered[rank, name] += sum(results)
        self.waiting.discard((rank, name))
        if rank in self.blocked and not any(waiter == rank for waiter, _ in self.waiting):
            self.blocked.discard(rank)
            self.job.set_blocked(rank, False)

    # --- The end -------------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "job"):
            return
        while self.running:
            self.end_round(*min(self.running))
        for name in BUCKETS:  # every rank uses every bucket at least once: round 0 waits for it
            if self.rounds[name] == 0:
                for rank in range(self.size):
                    if (rank, name) not in self.waiting:
                        self.submit(rank, name)
        for _ in range(ENOUGH_CYCLES):
            for rank in range(self.size):
                if any(waiter == rank for waiter, _ in self.waiting):
                    self.blocked.add(rank)
                    self.job.set_blocked(rank, True)
                else:
                    self.flushing.add(rank)
                    self.job.set_flush(rank, "flushing")
            self.cycle()
            while self.running:
                self.end_round(*min(self.running))
            if self.flushed:
                break
        assert self.flushed, "I6: the flush has not ended"
        for rank in range(self.size):
            for name in BUCKETS:
                self.delivered[rank, name] += sum(self.job.collect(rank, name))
        for rank in range(self.size):
            for name in BUCKETS:
                assert self.delivered[rank, name] == self.submitted[name], "I1: exactly once"
        assert self.gradients == self.arrivals, "I1: each contribution is counted once"

    @invariant()
    def nothing_is_delivered_twice(self) -> None:
        if hasattr(self, "job"):
            assert all(total <= self.submitted[name] for (_, name), total in self.delivered.items())


class ReplayingJob(Job):
    """The same, with missed results kept apart."""

    missed = "replay"


def run(machine: type[Job]) -> None:
    options = settings(max_examples=100, stateful_step_count=40, print_blob=True)
    run_state_machine_as_test(machine, settings=options)


def test_i1_i3_i4_i6_with_the_sum_of_missed_results() -> None:
    run(Job)


def test_i1_i3_i4_i6_with_replay() -> None:
    run(ReplayingJob)
