"""The files of a run, read into tables."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from horovod_partial import documents
from horovod_partial.recording.format import FORMAT, TABLES, VERSION, Header, Table, columns, joined

_FILE = re.compile(r"rank-(\d+)\.(\d+)\.jsonl")


@dataclass(frozen=True)
class Bucket:
    """What a rank has recorded under a number.

    Attributes:
        name: the same on all ranks; numbers are not.
        policy: its text.
        process_set: 0 for all ranks.
        nbytes: of a contribution.
    """

    name: str
    policy: str
    process_set: int
    nbytes: int


@dataclass(frozen=True)
class RankRecording:
    """What one rank has written.

    Attributes:
        rank: its number.
        host: its name.
        clock: ranks with the same text share the clock of `steady`.
        wall: Unix time at time 0 of the rank, in seconds, by the host's clock.
        steady: the host's monotonic clock at time 0 of the rank, in microseconds.
        ended: Horovod was shut down in good order.
        buckets: by their number on this rank.
        tables: by name; a column is an array of the shape (rows,), of int64 or of objects. Times are microseconds since
            time 0 of the rank.
    """

    rank: int
    host: str
    clock: str
    wall: float
    steady: int
    ended: bool
    buckets: dict[int, Bucket]
    tables: dict[str, Table]


@dataclass(frozen=True)
class Recording:
    """One run of a job.

    Attributes:
        run: its name, which is the time in UTC at which it began.
        size: ranks of the job, recorded or not.
        ranks: those that there are files of, by number, at least one.
        remarks: what is missing, in sentences.
    """

    run: str
    size: int
    ranks: dict[int, RankRecording]
    remarks: tuple[str, ...]


def runs(folder: str | PathLike[str]) -> dict[str, Path]:
    """The folders of the runs in a folder, or the folder itself if it is one of a run; by name, the oldest first."""
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"there is no folder {path}")
    if _files(path):
        return {path.resolve().name: path}
    return {inner.name: inner for inner in sorted(path.iterdir()) if inner.is_dir() and _files(inner)}


def load(folder: str | PathLike[str], run: str | None = None) -> Recording:
    """Read a run.

    A last line that is cut off is dropped. What else is missing (ranks, segments, the end) is told in `remarks`.

    Args:
        folder: holds runs, or is one.
        run: its name; None is the newest.

    Raises:
        ValueError: there is no such run; or a file of it is damaged, or of another format or version.
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
    files = _files(path).items()
    ranks = {rank: _rank(rank, segments, remarks) for rank, segments in files}
    read = {rank: found for rank, found in ranks.items() if found is not None}
    if not read:
        raise ValueError(f"{path} holds no recording: no file has a whole first line")
    headers = [header for _, header in read.values()]
    first = headers[0]
    for header in headers:
        if (header.run, header.size) != (first.run, first.size):
            raise ValueError(
                f"{path} holds files of several runs: rank {first.rank} is of {first.run} with {first.size} ranks, rank "
                f"{header.rank} of {header.run} with {header.size}; give each run a folder of its own"
            )
    missing = sorted(set(range(first.size)) - set(read))
    if missing:
        remarks.append(f"Of {first.size} ranks there are no files of {', '.join(map(str, missing))}.")
    recordings = {rank: recording for rank, (recording, _) in read.items()}
    killed = [rank for rank, recording in recordings.items() if not recording.ended]
    if killed:
        several = "ranks" if len(killed) > 1 else "rank"
        remarks.append(f"No end was recorded on {several} {', '.join(map(str, killed))}: killed, or still running.")
    if len(there) > 1 and run is None:
        others = ", ".join(sorted(set(there) - {path.name})[-3:])
        remarks.append(f"This is the newest of {len(there)} runs; --run picks another one, such as {others}.")
    return Recording(first.run, first.size, recordings, tuple(remarks))


def _files(folder: Path) -> dict[int, dict[int, Path]]:
    """The segments of each rank, by number, in order."""
    found = sorted(
        (int(match[1]), int(match[2]), path) for path in folder.iterdir() if (match := _FILE.fullmatch(path.name))
    )
    files: dict[int, dict[int, Path]] = {}
    for rank, segment, path in found:
        files.setdefault(rank, {})[segment] = path
    return files


def _rank(rank: int, files: dict[int, Path], remarks: list[str]) -> tuple[RankRecording, Header] | None:
    """One rank, or nothing if none of its files has a whole first line."""
    # The k-th arrival at a bucket has its k-th result, which holds only behind the last segment that is missing.
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
    names = tables.pop("buckets")
    rows = zip(
        *(names[column].tolist() for column in ("bucket", "name", "policy", "process_set", "bytes")), strict=True
    )
    buckets = {number: Bucket(*row) for number, *row in rows}
    for name in ("arrivals", "results", "rounds"):
        unknown = set(tables[name]["bucket"].tolist()) - set(buckets)
        if unknown:
            raise ValueError(
                f"{files[newest].parent}, rank {rank}: table {name!r} has buckets that no line names: {unknown}"
            )
    ended = bool(tables.pop("end")["time"].size)
    return RankRecording(rank, header.host, header.clock, header.wall, header.steady, ended, buckets, tables), header


def _segment(path: Path, lines: dict[str, list[Table]]) -> Header | None:
    """Add a file's lines to those of their tables. Returns its header, if it has a whole one."""
    header: Header | None = None
    raw = path.read_bytes().splitlines()
    for number, text in enumerate(raw, 1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            if number == len(raw):
                break
            raise ValueError(f"{path}, line {number} is no JSON; only the last line may be cut off") from None
        if not isinstance(line, dict):
            raise ValueError(f"{path}, line {number} is no table")
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
