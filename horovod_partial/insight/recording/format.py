"""The format of recordings: the header, and the columns that are read. `docs/slow-ranks.md` describes the format."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_partial._core import PARTS

FORMAT = "horovod_partial.recording"
VERSION = 2

Table = dict[str, NDArray[Any]]

# The tables of a recording, each with the types of the columns that are read: integers, texts, and lists of ranks.
TABLES: dict[str, dict[str, type]] = {
    # The columns of `buckets` after the first one are the fields of `reading.Bucket`, in this order.
    "buckets": {"bucket": int, "name": str, "policy": str, "process_set": int, "bytes": int},
    "steps": dict.fromkeys(
        ("bucket", "step", "begin", "handed", "result", "blocked", "reduced", "round", "late", "staleness", "bytes"),
        int,
    ),
    "waits": {"begin": int},
    "reductions": {"sequence": int, "process_set": int, "end": int, "everyone": int},
    "rounds": {"bucket": int, "time": int, "reason": str, "quorum": int, "missing": list, "delivered": list},
    "processor": {"time": int, "ran": int, "waited": int},
    "links": {"from": str, "to": str, "bytes": int, "rate": int},
    "end": {"time": int},
}
TABLES["steps"] |= dict.fromkeys(PARTS, int)  # older recordings lack these columns


@dataclass(frozen=True)
class Header:
    """The first line of a segment, which is one file of a rank's recording.

    `format` is always `FORMAT`, and `version` always `VERSION`. `run` is the run's name, the time of its begin in UTC.
    `size` is the number of ranks in the job. `clock` names the monotonic clock; ranks with the same text share the
    clock. `segment` is the number of the segment. At time 0 of the rank's recorded times, the host's wall clock showed
    the Unix time `wall`, in seconds, and its monotonic clock showed `steady`, in microseconds.
    """

    format: str
    version: int
    run: str
    rank: int
    size: int
    host: str
    clock: str
    segment: int
    wall: float
    steady: int

    def __post_init__(self) -> None:
        if not math.isfinite(self.wall) or not 0 <= self.steady < 2**53:
            raise ValueError(f"wall {self.wall} and steady {self.steady} are not valid times")
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ValueError(f"there is no rank {self.rank} of {self.size}")


def columns(name: str, line: dict[str, Any]) -> Table:
    """Return the columns in one line of a recording. The line belongs to the table `name`.

    Raises ValueError if a column is missing, has another length than the others, or has values of another type.
    """
    read: Table = {}
    for column, kind in TABLES[name].items():
        # Where an older recording lacks a column, the values are unknown.
        values = line.get(column, [-1] * len(next(iter(read.values()))) if column in PARTS else None)
        if not isinstance(values, list):
            raise ValueError(f"table {name!r} has no column {column!r}")
        if not all(type(value) is kind for value in values):
            raise ValueError(f"column {column!r} of table {name!r} holds a value that is not of type {kind.__name__}")
        try:
            read[column] = np.fromiter(values, dtype=np.int64 if kind is int else object, count=len(values))
        except OverflowError:
            raise ValueError(f"column {column!r} of table {name!r} holds a number of more than 64 bits") from None
    if len({len(values) for values in read.values()}) > 1:
        raise ValueError(f"the columns of table {name!r} differ in length")
    return read


def joined(name: str, lines: list[Table]) -> Table:
    """Return a table with the rows of several lines of a recording, in the order of the lines."""
    empty = columns(name, {column: [] for column in TABLES[name]})
    return {column: np.concatenate([line[column] for line in (empty, *lines)]) for column in empty}
