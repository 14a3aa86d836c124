"""The format of recordings: its header, and the columns of its tables that are read. `docs/slow-ranks.md` describes both."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMAT = "horovod_partial.recording"
VERSION = 1

Table = dict[str, NDArray[Any]]

# The kinds of columns: whole numbers, texts, and lists of ranks. Tables and columns that are not here are left unread.
TABLES: dict[str, dict[str, type]] = {
    "buckets": {"bucket": int, "name": str, "policy": str, "process_set": int, "bytes": int},
    "arrivals": {"step": int, "bucket": int, "time": int},
    "results": {"bucket": int, "time": int, "round": int, "late": int, "staleness": int},
    "waits": {"bucket": int, "begin": int, "end": int},
    "handed": {"time": int, "tensors": int},
    "reductions": {
        "sequence": int,
        "process_set": int,
        "step": int,
        "begin": int,
        "end": int,
        "bytes": int,
        "everyone": int,
    },
    "rounds": {
        "bucket": int,
        "round": int,
        "time": int,
        "reason": str,
        "quorum": int,
        "missing": list,
        "delivered": list,
    },
    "end": {"time": int},
}


@dataclass(frozen=True)
class Header:
    """The first line of a segment."""

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
            raise ValueError(f"wall {self.wall} and steady {self.steady} are no times")
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ValueError(f"there is no rank {self.rank} of {self.size}")


def columns(name: str, line: dict[str, Any]) -> Table:
    """The columns of a line of table `name`.

    Raises:
        ValueError: a column is missing, longer or shorter than another one, or of another kind.
    """
    read = {}
    for column, kind in TABLES[name].items():
        values = line.get(column)
        if not isinstance(values, list):
            raise ValueError(f"table {name!r} has no column {column!r}")
        if not all(type(value) is kind for value in values):
            raise ValueError(f"column {column!r} of table {name!r} holds something that is no {kind.__name__}")
        try:
            read[column] = np.fromiter(values, dtype=np.int64 if kind is int else object, count=len(values))
        except OverflowError:
            raise ValueError(f"column {column!r} of table {name!r} holds a number of more than 64 bits") from None
    if len({len(values) for values in read.values()}) > 1:
        raise ValueError(f"the columns of table {name!r} have not the same length")
    return read


def joined(name: str, lines: list[Table]) -> Table:
    """The rows of all lines of a table, in their order."""
    kinds = TABLES[name].items()
    if not lines:
        return {column: np.empty(0, dtype=np.int64 if kind is int else object) for column, kind in kinds}
    return {column: np.concatenate([line[column] for line in lines]) for column, _ in kinds}
