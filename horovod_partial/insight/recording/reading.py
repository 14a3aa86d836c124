"""Reads the files of a recorded job, and returns their contents as tables."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from horovod_partial import documents
from horovod_partial.insight.recording.format import FORMAT, TABLES, VERSION, Header, Table, columns, joined

_FILE = re.compile(r"rank-(\d+)\.(\d+)\.jsonl")


@dataclass(frozen=True)
class Bucket:
    """A bucket in the recording of a rank. All ranks give a bucket the same name, but maybe different numbers.

    `policy` is the text of its policy. `process_set` is the number of the process set; 0 has all ranks. A contribution
    has `nbytes` bytes.
    """

    name: str
    policy: str
    process_set: int
    nbytes: int


@dataclass(frozen=True)
class RankRecording(Header):
    """The recording of one rank: the header of its newest segment, and the contents of its segments.

    `ended` says whether Horovod was shut down in good order. `buckets` has the buckets by their number on this rank.
    `tables` has the tables by name, each with its columns by name. A column is an array of the shape (rows,), of int64
    or of objects. Times are microseconds since time 0 of the rank.
    """

    ended: bool
    buckets: dict[int, Bucket]
    tables: dict[str, Table]

    @property
    def starved(self) -> float:
        """The share of the time of its steps, 0 to 1, for which the rank was ready to run, but had to wait for a processor.

        The sum over the threads is compared with the time from the first step's begin to the last step's result. If the
        threads together were ready to run for longer than that, it is compared with this longer time.
        """
        times, steps = self.tables["processor"], self.tables["steps"]
        begun = steps["begin"][steps["begin"] >= 0]
        if not len(begun) or not len(times["time"]):
            return 0.0
        span = [begun.min(), steps["result"].max()]
        passed, ran, waited = (np.ptp(np.interp(span, times["time"], column)) for column in times.values())
        return float(waited / max(passed, ran + waited, 1.0))


@dataclass(frozen=True)
class Recording:
    """The recording of one run of a job.

    `run` is the run's name, the time of its begin in UTC. `size` is the number of ranks in the job, recorded or not.
    `ranks` has the recordings of the ranks with files, by rank; at least one. `remarks` are sentences about missing
    data.
    """

    run: str
    size: int
    ranks: dict[int, RankRecording]
    remarks: tuple[str, ...]


def runs(folder: str | PathLike[str]) -> dict[str, Path]:
    """Return the folders of all recorded runs in a folder, by name, oldest first.

    If the folder itself holds the files of a run, the result has only this folder. Raises ValueError if it does not
    exist.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"there is no folder {path}")
    if _files(path):
        return {path.resolve().name: path}
    return {inner.name: inner for inner in sorted(path.iterdir()) if inner.is_dir() and _files(inner)}


def load(folder: str | PathLike[str], run: str | None = None) -> Recording:
    """Read the recording of a run in a folder of runs, or in the folder of the run. Without `run`, the newest is read.

    A last line that is cut off is dropped. `remarks` of the result says whether ranks, segments or ends are missing.
    Raises ValueError if there is no such run, or one of its files is damaged, or has another format or version.
    """
    there = runs(folder)
    if not there:
        raise ValueError(
            f"{folder} holds no recording: no file of it or of a folder in it is named rank-RANK.SEGMENT.jsonl"
        )
    if run is not None and run not in there:
        raise ValueError(f"{folder} holds no run {run}; there are {', '.join(there)}")
    path = there[run] if run is not None else there[max(there)]
    remarks: list[str] = []
    ranks = (_rank(rank, segments, remarks) for rank, segments in _files(path).items())
    recordings = {recording.rank: recording for recording in ranks if recording is not None}
    if not recordings:
        raise ValueError(f"{path} holds no recording: no file has a whole first line")
    first = next(iter(recordings.values()))
    for other in recordings.values():
        if (other.run, other.size) != (first.run, first.size):
            raise ValueError(
                f"{path} holds files of several runs: rank {first.rank} is of {first.run} with {first.size} ranks, rank "
                f"{other.rank} of {other.run} with {other.size}; give each run a folder of its own"
            )
    missing = sorted(set(range(first.size)) - set(recordings))
    if missing:
        remarks.append(f"Of {first.size} ranks there are no files of {', '.join(map(str, missing))}.")
    killed = [rank for rank, recording in recordings.items() if not recording.ended]
    if killed:
        several = "ranks" if len(killed) > 1 else "rank"
        remarks.append(f"No end was recorded on {several} {', '.join(map(str, killed))}: killed, or still running.")
    if len(there) > 1 and run is None:
        others = ", ".join(sorted(set(there) - {path.name})[-3:])
        remarks.append(f"This is the newest of {len(there)} runs; --run picks another one, such as {others}.")
    return Recording(first.run, first.size, recordings, tuple(remarks))


def _files(folder: Path) -> dict[int, dict[int, Path]]:
    """Return the files of each rank in the folder of a run, by the number of the segment, in order."""
    found = sorted(
        (int(match[1]), int(match[2]), path) for path in folder.iterdir() if (match := _FILE.fullmatch(path.name))
    )
    files: dict[int, dict[int, Path]] = {}
    for rank, segment, path in found:
        files.setdefault(rank, {})[segment] = path
    return files


def _rank(rank: int, files: dict[int, Path], remarks: list[str]) -> RankRecording | None:
    """Read a rank's recording; None if no file has a whole first line. Adds texts about missing files to `remarks`."""
    # The steps before and after a missing file do not follow each other, so use only files after the last missing one.
    newest = max(files)
    oldest = next(number for number in range(newest, -2, -1) if number not in files) + 1
    if oldest > 0:
        told = "were dropped" if oldest == min(files) else f"are left out, since segment {oldest - 1} is missing"
        remarks.append(f"Rank {rank}: the segments before {oldest} {told}, so its recording begins later.")
    header: Header | None = None
    lines: dict[str, list[Table]] = defaultdict(list)
    for number in range(oldest, newest + 1):
        found = _segment(files[number], lines)
        if found is None:
            continue
        if (found.rank, found.segment) != (rank, number):
            raise ValueError(f"{files[number]} is of rank {found.rank}, segment {found.segment}: it was renamed")
        if header is not None and (header.run, header.steady) != (found.run, found.steady):
            raise ValueError(f"{files[number]} is of another run, or of another start of it, than the segment before")
        header = found
    if header is None:
        remarks.append(f"Rank {rank}: no file has a whole first line.")
        return None
    tables = {name: joined(name, lines[name]) for name in TABLES}
    rows = zip(*(column.tolist() for column in tables.pop("buckets").values()), strict=True)
    buckets = {number: Bucket(*row) for number, *row in rows}
    for name, known in (("steps", {-1, *buckets}), ("rounds", set(buckets))):
        unknown = set(tables[name]["bucket"].tolist()) - known
        if unknown:
            raise ValueError(
                f"{files[newest].parent}, rank {rank}: table {name!r} has buckets that no line names: {unknown}"
            )
    ended = bool(tables.pop("end")["time"].size)
    return RankRecording(**asdict(header), ended=ended, buckets=buckets, tables=tables)


def _segment(path: Path, lines: dict[str, list[Table]]) -> Header | None:
    """Add the lines of a segment's file to `lines`, by table. Returns the header, or None if it is cut off."""
    header: Header | None = None
    raw = path.read_bytes().splitlines()
    for number, text in enumerate(raw, 1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            if number == len(raw):
                break
            raise ValueError(f"{path}, line {number} is not JSON; only the last line may be cut off") from None
        if not isinstance(line, dict):
            raise ValueError(f"{path}, line {number} is not a table")
        if header is None:
            header = _header(line, path)
        elif isinstance(name := line.get("table"), str) and name in TABLES:
            try:
                lines[name].append(columns(name, line))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    return header


def _header(line: dict[str, Any], path: Path) -> Header:
    if line.get("format") != FORMAT:
        raise ValueError(f"{path} holds no recording of horovod-partial: its first line has no format {FORMAT!r}")
    if line.get("version") != VERSION:
        raise ValueError(
            f"{path} holds a recording of version {line.get('version')!r}, and this horovod-partial reads {VERSION}; read it "
            "with the horovod-partial that wrote it"
        )
    return documents.read_as(Header, line, path, "recording")
