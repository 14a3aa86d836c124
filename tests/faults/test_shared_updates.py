"""The rules of work sharing find each kind of violation in a history that was doctored, and none in histories that are sound."""

import random
from collections.abc import Callable

import pytest
from checker import check
from history import Event, micro_batch

Histories = dict[int, list[Event]]
SIZE, NUMBERS, UPDATES = 3, 6, 8
BUCKETS = ("first", "second")
SKIPPED = (1, 2)  # an update, and the number in it whose gradient is in the first bucket only
LEAVER = 2


class Scene:
    """A job whose updates are shared as docs/protocol.md has it: who makes which micro-batch is drawn."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.histories: Histories = {rank: [] for rank in range(SIZE)}
        self.training = list(range(SIZE))  # ranks that have not left
        self.time = 0.0
        self.update = 0
        self.applied = dict.fromkeys(BUCKETS, 0)  # micro-batches
        for rank in range(SIZE):
            self.write(rank, "begin", rank=rank, size=SIZE, seed=seed)
            for bucket in BUCKETS:
                self.write(rank, "bucket", b=bucket, policy="work_sharing", optimizer=True, numbers=NUMBERS)

    def write(self, rank: int, kind: str, /, **fields: object) -> None:
        self.time += 0.001
        self.histories[rank].append({"e": kind, "t": self.time, **fields})

    def make(self, numbers: list[int]) -> dict[str, list[int]]:
        """Ranks make these micro-batches; their sums, by bucket."""
        sums = {bucket: [0] * (3 * NUMBERS) for bucket in BUCKETS}
        for number in numbers:
            rank, skips = self.rng.choice(self.training), (self.update, number) == SKIPPED
            self.write(rank, "begun", u=self.update, n=number)
            self.write(rank, "made", u=self.update, n=number, skips=skips)
            for bucket in BUCKETS[:1] if skips else BUCKETS:
                (own,) = micro_batch(rank, self.update, number, NUMBERS, [self.applied[bucket]])
                sums[bucket] = [a + b for a, b in zip(sums[bucket], own, strict=True)]
        return sums

    def take(self, rank: int, sums: dict[str, list[int]]) -> None:
        for bucket, values in sums.items():
            self.write(rank, "result", b=bucket, round=self.update, low=list(values), high=list(values))
        self.write(rank, "replica", digest=str(self.update))

    def close(self, sums: dict[str, list[int]]) -> None:
        """The update has been taken."""
        for bucket, values in sums.items():
            self.applied[bucket] += sum(values[:NUMBERS])
        self.update += 1

    def share(self) -> None:
        """An update, which all ranks take that have not left."""
        sums = self.make(self.rng.sample(range(NUMBERS), NUMBERS))
        for rank in self.training:
            self.take(rank, sums)
        self.close(sums)

    def flush(self) -> None:
        """It closes an update of two micro-batches."""
        sums = self.make([4, 0])
        for rank in self.training:
            self.write(rank, "wait", n=self.update, what="flush")
            self.take(rank, sums)
            self.write(rank, "done", n=self.update)
            self.write(rank, "flushed")
        self.close(sums)


def healthy(seed: int) -> Histories:
    """The histories of a job in which all is well: with flushes, a micro-batch that was skipped, and a rank that leaves."""
    scene = Scene(seed)
    for _ in range(UPDATES):
        scene.share()
    scene.flush()
    scene.share()
    scene.write(LEAVER, "leave")
    scene.training.remove(LEAVER)
    scene.share()
    scene.flush()
    for rank in scene.training:
        scene.write(rank, "end")
    return scene.histories


def results(histories: Histories, update: int, bucket: str | None = None, rank: int | None = None) -> list[Event]:
    """Of an update, from all buckets and ranks or from one."""
    return [
        event
        for of, events in histories.items()
        for event in events
        if event["e"] == "result" and event["round"] == update
        if bucket in (None, event["b"]) and rank in (None, of)
    ]


def put(event: Event, number: int, values: list[int]) -> None:
    """Let a result have this count, mark and weights of a micro-batch."""
    for bound in ("low", "high"):
        event[bound][number::NUMBERS] = values


def remove(events: list[Event], number: int) -> None:
    """Take a micro-batch out of results."""
    for event in events:
        put(event, number, [0, 0, 0])


def unsay(histories: Histories, kind: str, update: int, number: int) -> None:
    """Nobody has told this of a micro-batch."""
    for events in histories.values():
        events[:] = [
            event for event in events if (event["e"], event.get("u"), event.get("n")) != (kind, update, number)
        ]


def lose(histories: Histories) -> None:
    """What was made is in no bucket on any rank."""
    remove(results(histories, 2), 3)


def lose_in_a_bucket(histories: Histories) -> None:
    remove(results(histories, FLUSHED, BUCKETS[1]), 4)


def double(histories: Histories) -> None:
    """A gradient was added twice, everywhere."""
    for event in results(histories, 3):
        put(event, 2, [2 * value for value in event["low"][2::NUMBERS]])


def replace(histories: Histories) -> None:
    """In place of a micro-batch its gradient of the update before is in this one."""
    for bucket in BUCKETS:
        (before,) = results(histories, 3, bucket, 0)
        for event in results(histories, 4, bucket):
            put(event, 1, [*before["low"][1 : 2 * NUMBERS : NUMBERS], event["low"][2 * NUMBERS + 1]])


def make_twice(histories: Histories) -> None:
    """Another rank makes a micro-batch too."""
    events = [event for events in histories.values() for event in events]
    made = next(event for event in events if event["e"] == "made" and (event["u"], event["n"]) == (1, 0))
    histories[LEAVER].append(made)


def make_unasked(histories: Histories) -> None:
    """A rank makes a micro-batch that it has not begun."""
    unsay(histories, "begun", 2, 5)


def close_early(histories: Histories) -> None:
    """An update closes with too few, while no rank leaves; nobody has made the other one."""
    unsay(histories, "made", 6, 4)
    remove(results(histories, 6), 4)


def close_without_one(histories: Histories) -> None:
    """An update closes with too few, while one rank does not flush."""
    for kind in ("wait", "done"):
        histories[1].remove(next(event for event in histories[1] if event["e"] == kind))


def be_stale(histories: Histories) -> None:
    """One gradient is of the weights before the last update, on all ranks."""
    for event in results(histories, 4, BUCKETS[0]):
        put(event, 3, [*event["low"][3 : 2 * NUMBERS : NUMBERS], event["low"][2 * NUMBERS + 3] - NUMBERS])


def leave_behind(histories: Histories) -> None:
    """A rank has not the update of the flush."""
    for event in results(histories, FLUSHED, rank=1):
        histories[1].remove(event)


def leave_behind_at_the_end(histories: Histories) -> None:
    """What a rank made before it left is in no update of the others."""
    for events in histories.values():
        events[:] = [event for event in events if event.get("round", 0) <= FLUSHED and event["e"] != "made"]
    histories[LEAVER].insert(-1, {"e": "made", "t": 0.0, "u": FLUSHED + 1, "n": 0, "skips": False})


def differ(histories: Histories) -> None:
    """One rank has another maker of a micro-batch than the others, which has begun it too."""
    (event,) = results(histories, 5, BUCKETS[0], 0)
    (own,) = micro_batch(7, 5, 2, NUMBERS, [event["low"][2 * NUMBERS + 2]])
    histories[0].append({"e": "begun", "t": 0.0, "u": 5, "n": 2})
    put(event, 2, own[2::NUMBERS])


def differ_between_buckets(histories: Histories) -> None:
    """A flush delivers a micro-batch in one bucket only, of which nobody says that it was made."""
    unsay(histories, "made", FLUSHED, 4)
    remove(results(histories, FLUSHED, BUCKETS[1]), 4)


FLUSHED = UPDATES  # the update that the first flush has closed

VIOLATIONS: list[tuple[str, Callable[[Histories], None]]] = [
    ("is lost", lose),
    ("is lost", lose_in_a_bucket),
    ("2 times micro-batch 2", double),
    ("is not what a rank had begun", replace),
    ("was made by ranks", make_twice),
    ("is not what a rank had begun", make_unasked),
    ("are missing", close_early),
    ("are missing", close_without_one),
    ("gradients are of the weights", be_stale),
    ("were begun before", leave_behind),
    ("were begun before", leave_behind_at_the_end),
    ("has another result", differ),
    ("has other micro-batches", differ_between_buckets),
]


@pytest.mark.parametrize("seed", range(20))
def test_sound_histories_have_no_violation(seed: int) -> None:
    assert check(healthy(seed)) == []


@pytest.mark.parametrize(("text", "plant"), VIOLATIONS, ids=[plant.__name__ for _, plant in VIOLATIONS])
def test_each_planted_violation_is_found(text: str, plant: Callable[[Histories], None]) -> None:
    for seed in range(5):
        histories = healthy(seed)
        plant(histories)
        found = check(histories)
        assert any(text in violation for violation in found), (seed, found)


def test_a_job_that_was_cut_off_is_judged_by_what_was_told() -> None:
    histories = healthy(3)
    everything = sorted(event["t"] for events in histories.values() for event in events)
    for moment in everything[::7]:
        cut = {rank: [event for event in events if event["t"] < moment] for rank, events in histories.items()}
        assert check(cut) == []
    remove(results(cut, 1, rank=1), 0)
    assert check(cut)
