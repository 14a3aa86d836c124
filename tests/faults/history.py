"""What each rank says of itself while a job runs: events, one JSON object in a line, appended and never changed.

A line is one `write` to a file that was opened to append, so that a rank that is killed loses nothing. `checker.py` reads
the files when the job is over. Nothing here knows the plugin.

Events, by `e`; all have `t`, the seconds of the monotonic clock, which the processes of a host share:

| e | says |
|---|---|
| begin | `rank`, `size`, and `seed` of the run |
| bucket | `b` is its name; `policy`, `quorum` (arrivals that close a round), `staleness`, `limit` (untaken results), `optimizer`; under work sharing only `numbers`, the micro-batches of an update |
| submit | this rank is about to arrive at bucket `b` with its contribution number `s`, counted from 0 |
| result | of bucket `b`, up to round `round`: `low` and `high`, the least and the greatest that the copies of the result hold; `s` if it is that of a submission, then also `late` and `missed` |
| wait, done, error | a call number `n` that waits for other ranks: what it is, and how it ended |
| fault | what happens to this rank now: `kind` and `seconds` |
| replica | `digest` of a model and its optimizer, which must be the same on all ranks |
| begun | this rank is about to make micro-batch `n` of update `u`, under work sharing |
| made | it has made the gradients of that; if it `skips`, it may have failed before it had made all, and the rest are zeros |
| closed | statistics of bucket `b`: why its rounds closed, by reason |
| end | the program has come to its end, and Horovod is shut down |
"""

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Event = dict[str, Any]

COPIES = 64  # of a contribution in its bucket; torn data shows in their differences
# Reasons for which a round closes without its quorum, or without a rank that has been away for long.
WITHOUT_QUORUM = ("liveness", "flush", "end")
_MARK_BITS = 31  # so that a float64 sums them exactly for 4 million contributions


def mark(rank: int, number: int) -> int:
    """What tells a contribution from all others; a sum of some tells which they are."""
    mixed = (rank * 1_000_003 + number + 1) * 0x9E3779B97F4A7C15
    return (mixed >> 17) % (1 << _MARK_BITS)


def contribution(rank: int, number: int, size: int) -> list[int]:
    """Of one rank: in a sum, who has contributed how often, and what. 2 * size numbers, to be copied `COPIES` times."""
    own = [0] * (2 * size)
    own[rank], own[size + rank] = 1, mark(rank, number)
    return own


def micro_batch(rank: int, update: int, number: int, numbers: int, weights: Sequence[int]) -> list[list[int]]:
    """Gradients of one micro-batch of `numbers`: in their sum, which are in it, who has made them, and of which weights.

    Each copy has 3 * numbers numbers, and says of one number what its weights were.
    """
    copies = []
    for weight in weights:
        own = [0] * (3 * numbers)
        own[number], own[numbers + number] = 1, mark(rank, update * numbers + number)
        own[2 * numbers + number] = weight
        copies.append(own)
    return copies


class Writer:
    """Appends the events of one rank, from any of its threads."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = os.open(folder / f"history.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._lock = threading.Lock()  # guards the count of waits
        self._waits = 0

    def write(self, kind: str, /, **fields: Any) -> None:
        line = json.dumps({"e": kind, "t": round(time.monotonic(), 6), **fields}, separators=(",", ":"))
        os.write(self._file, line.encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Around a call that waits for other ranks."""
        with self._lock:
            number = self._waits
            self._waits += 1
        self.write("wait", n=number, what=what)
        try:
            yield
        except BaseException as error:
            self.write("error", n=number, kind=type(error).__name__, text=str(error))
            raise
        self.write("done", n=number)


def read(folder: Path) -> dict[int, list[Event]]:
    """The histories of a job, by rank. What a rank had begun to write when it was killed is left out."""
    histories = {}
    for file in sorted(folder.glob("history.*")):
        lines = file.read_bytes().split(b"\n")
        histories[int(file.name.rpartition(".")[2])] = [json.loads(line) for line in lines[:-1]]
    return histories
