"""The checker finds each kind of violation in a history that was doctored, and none in histories that are sound."""

import random
from collections.abc import Callable

import pytest
from checker import check
from history import Event, contribution

Histories = dict[int, list[Event]]
SIZE, STEPS, QUORUM, STALENESS, LIMIT = 3, 30, 2, 3, 8
BUCKET = "bucket"


def add(sums: list[int], more: list[int]) -> list[int]:
    return [a + b for a, b in zip(sums, more, strict=True)]


class Scene:
    """A job of rounds as docs/protocol.md has them, in a few lines: who is on time is drawn, late ranks get what they missed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.histories: Histories = {rank: [] for rank in range(SIZE)}
        self.time = 0.0
        self.waits = [0] * SIZE
        self.submitted = [0] * SIZE
        self.pending = [[0] * (2 * SIZE) for _ in range(SIZE)]
        self.missed: list[list[tuple[int, list[int]]]] = [[] for _ in range(SIZE)]
        self.away = [0] * SIZE  # rounds in a row without a contribution
        self.rounds = self.flushes = 0

    def begin(self, seed: int) -> None:
        bounds = {"quorum": QUORUM, "staleness": STALENESS, "limit": LIMIT}
        for rank in range(SIZE):
            self.write(rank, "begin", rank=rank, size=SIZE, seed=seed)
            self.write(rank, "bucket", b=BUCKET, policy="majority", optimizer=False, **bounds)

    def end(self) -> None:
        for rank in range(SIZE):
            self.write(rank, "replica", digest="same")
            self.write(rank, "closed", b=BUCKET, by={"quorum": self.rounds - self.flushes, "flush": self.flushes})
            self.write(rank, "end")

    def write(self, rank: int, kind: str, /, **fields: object) -> None:
        self.time += 0.001
        self.histories[rank].append({"e": kind, "t": self.time, **fields})

    def submit(self, rank: int) -> list[int]:
        number = self.submitted[rank]
        self.submitted[rank] += 1
        self.write(rank, "submit", b=BUCKET, s=number)
        self.write(rank, "wait", n=self.waits[rank], what="round")
        return contribution(rank, number, SIZE)

    def result(self, rank: int, values: list[int], **fields: object) -> None:
        if "s" in fields:
            self.write(rank, "done", n=self.waits[rank])
            self.waits[rank] += 1
        self.write(rank, "result", b=BUCKET, low=values, high=list(values), **fields)

    def round(self, on_time: set[int]) -> None:
        """A round closes with these ranks; others that are drawn submit afterwards, and get what they have missed."""
        sums = [0] * (2 * SIZE)
        for rank in range(SIZE):
            own = self.pending[rank]
            if rank in on_time:
                own = add(own, self.submit(rank))
            self.away[rank] = 0 if own[rank] else self.away[rank] + 1
            sums = add(sums, own)
            self.pending[rank] = [0] * (2 * SIZE)
        for rank in range(SIZE):
            if rank in on_time:
                self.result(rank, list(sums), round=self.rounds, s=self.submitted[rank] - 1, late=False, missed=0)
            else:
                self.missed[rank].append((self.rounds, list(sums)))
        self.rounds += 1

    def late(self, rank: int) -> None:
        self.pending[rank] = add(self.pending[rank], self.submit(rank))
        self.take(rank, s=self.submitted[rank] - 1, late=True)

    def take(self, rank: int, **fields: object) -> None:
        values, missed = [0] * (2 * SIZE), self.missed[rank]
        for _, one in missed:
            values = add(values, one)
        newest = missed[-1][0] if missed else None
        self.missed[rank] = []
        self.result(rank, values, round=newest, missed=len(missed), **fields)

    def flush(self) -> None:
        for rank in range(SIZE):
            self.write(rank, "wait", n=self.waits[rank], what="flush")
        self.round(set())
        self.flushes += 1
        for rank in range(SIZE):
            self.write(rank, "done", n=self.waits[rank])
            self.waits[rank] += 1
            self.take(rank)
            self.write(rank, "flushed")


def healthy(seed: int) -> Histories:
    """The histories of a job in which all is well."""
    scene = Scene(seed)
    scene.begin(seed)
    for step in range(STEPS):
        behind = [rank for rank in range(SIZE) if scene.missed[rank]]
        for rank in behind:
            if scene.rng.random() < 0.5:
                scene.late(rank)
        ready = [rank for rank in range(SIZE) if not scene.missed[rank]]
        stale = [rank for rank in range(SIZE) if scene.away[rank] >= STALENESS and not any(scene.pending[rank])]
        if len(ready) < QUORUM or stale:
            for rank in [rank for rank in range(SIZE) if scene.missed[rank]]:
                scene.late(rank)
            ready = list(range(SIZE))
        scene.round(set(scene.rng.sample(ready, scene.rng.randint(QUORUM, len(ready)))) | set(stale))
        if step == STEPS // 2:
            scene.flush()
    scene.flush()
    scene.end()
    return scene.histories


def results(histories: Histories, rank: int, **wanted: object) -> list[Event]:
    """Results of a rank that have something in them, and these fields."""
    return [
        event
        for event in histories[rank]
        if event["e"] == "result"
        and any(event["low"])
        and all(event.get(key) == value for key, value in wanted.items())
    ]


def change(event: Event, index: int, by: int) -> None:
    event["low"][index] += by
    event["high"][index] += by


def lose(histories: Histories) -> None:
    """On no rank does a contribution of rank 0 arrive; all agree."""
    for rank in range(SIZE):
        event = next(event for event in results(histories, rank) if event["low"][0] == 1)
        change(event, SIZE, -event["low"][SIZE])
        change(event, 0, -1)


def double(histories: Histories) -> None:
    """The first contribution of rank 1 is delivered twice, to everybody."""
    own = contribution(1, 0, SIZE)
    for rank in range(SIZE):
        event = results(histories, rank)[3]
        event["low"], event["high"] = add(event["low"], own), add(event["high"], own)


def swap(histories: Histories) -> None:
    """A contribution is delivered in place of another."""
    for rank in range(SIZE):
        change(results(histories, rank)[0], SIZE + 2, 1)


def withhold_after_flush(histories: Histories) -> None:
    """What a rank has missed is not there after the flush, but with the next result."""
    events = histories[0]
    flushed = next(index for index, event in enumerate(events) if event["e"] == "flushed")
    newest = next(event for event in reversed(events[:flushed]) if event["e"] == "result" and any(event["low"]))
    following = next(event for event in events[flushed:] if event["e"] == "result")
    following["low"], following["high"] = add(following["low"], newest["low"]), add(following["high"], newest["high"])
    newest["low"] = newest["high"] = [0] * (2 * SIZE)
    newest["round"] = newest["late"] = None


def lose_at_the_end(histories: Histories) -> None:
    """The last result of one rank is not there."""
    event = results(histories, 1)[-1]
    event["low"] = event["high"] = [0] * (2 * SIZE)
    event["round"] = event["late"] = None


def differ(histories: Histories) -> None:
    """One rank gets another mark than the others, in a round that others tell of too."""
    rounds = {event["round"] for event in results(histories, 1, late=False)}
    change(next(event for event in results(histories, 0, late=False) if event["round"] in rounds), SIZE, 1)


def reorder(histories: Histories) -> None:
    """A rank gets an older round after a newer one."""
    first, second = results(histories, 2)[:2]
    first["round"], second["round"] = second["round"], first["round"]


def close_early(histories: Histories) -> None:
    """Three rounds had one arrival only, and two may."""
    for number in range(2, 5):
        arrivals = [event for rank in range(SIZE) for event in results(histories, rank, round=number, late=False)]
        for event in arrivals[1:]:
            event["late"] = True


def absence(rounds: int) -> Histories:
    """Rank 2 is there, and contributes nothing for so many rounds: its contributions come later, all at once."""
    scene = Scene(0)
    scene.begin(0)
    scene.round({0, 1, 2})
    for _ in range(rounds):
        scene.round({0, 1})
    scene.late(2)
    scene.round({0, 1})
    scene.flush()
    scene.end()
    return scene.histories


def leave_out(histories: Histories) -> None:
    """A rank contributes nothing for longer than it may."""
    histories.update(absence(STALENESS + 3))


def pile_up(histories: Histories) -> None:
    """More rounds wait for a rank of an optimizer than may."""
    histories.update(absence(LIMIT + 2))
    for events in histories.values():
        for event in events:
            if event["e"] == "bucket":
                event |= {"optimizer": True, "staleness": 1000}


def break_full(histories: Histories) -> None:
    for events in histories.values():
        for event in events:
            if event["e"] == "bucket":
                event["policy"] = "full"


def wait_for_ever(histories: Histories) -> None:
    events = histories[1]
    events.remove(next(event for event in events if event["e"] == "done"))


def deliver_after_an_error(histories: Histories) -> None:
    index = next(index for index, event in enumerate(histories[2]) if event["e"] == "submit" and event["s"] == 5)
    histories[2].insert(index, {"e": "error", "t": 0.0, "n": 999, "kind": "HorovodInternalError", "text": ""})


def tear(histories: Histories) -> None:
    event = results(histories, 0)[4]
    event["high"] = [*event["high"][:-1], event["high"][-1] + 1]


def part_models(histories: Histories) -> None:
    next(event for event in histories[1] if event["e"] == "replica")["digest"] = "other"


def forget_model(histories: Histories) -> None:
    histories[1] = [event for event in histories[1] if event["e"] != "replica"]


VIOLATIONS: list[tuple[str, Callable[[Histories], None]]] = [
    ("I1", lose),
    ("I1", double),
    ("I1", swap),
    ("I1", withhold_after_flush),
    ("I1", lose_at_the_end),
    ("I2", differ),
    ("I2", reorder),
    ("I3", close_early),
    ("I4", leave_out),
    ("I4", pile_up),
    ("I5", break_full),
    ("I6", wait_for_ever),
    ("I6", deliver_after_an_error),
    ("I7", tear),
    ("I9", part_models),
    ("I9", forget_model),
]


@pytest.mark.parametrize("seed", range(20))
def test_sound_histories_have_no_violation(seed: int) -> None:
    assert check(healthy(seed)) == []


@pytest.mark.parametrize(("number", "plant"), VIOLATIONS, ids=[plant.__name__ for _, plant in VIOLATIONS])
def test_each_planted_violation_is_found(number: str, plant: Callable[[Histories], None]) -> None:
    for seed in range(5):
        histories = healthy(seed)
        plant(histories)
        found = check(histories)
        assert any(violation.startswith(number) for violation in found), (seed, found)


def test_a_job_that_was_cut_off_is_judged_by_what_was_told() -> None:
    """After a fault the histories end somewhere; nothing of that is a violation, but what was wrong before still is."""
    histories = healthy(3)
    cut = {rank: events[: len(events) * (rank + 2) // 5] for rank, events in histories.items()}
    assert check(cut) == []
    change(results(cut, 1, late=False)[2], SIZE, 1)
    assert check(cut)
