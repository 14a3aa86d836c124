"""Recordings of jobs that never ran: ranks with given compute times under a policy, on hosts with clocks of their own.

The files are in the format of docs/slow-ranks.md. Times of the job are in seconds; a host's clock shows `boot + offset +
(1 + drift) * time`.
"""

import heapq
import json
import math
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_partial._core import PARTS
from horovod_partial.policies import SharedUpdates

RUN = "20261123T223115.123456Z"
BOOT = 50_000.0
WALL = 1_795_473_075.0
# Each rank has its own numbers for the buckets, so nobody may take one rank's for another's.
BUCKETS = ("optimizer.0", "optimizer.1")
NBYTES = (4_000_000, 1_000_000)
WAKING = 3e-4  # from a result to the application that waited for it
FIRST = 1.0  # when the first step begins, in seconds


@dataclass
class Host:
    """One host's clock and load."""

    name: str
    offset: float = 0.0
    drift: float = 0.0
    wall_error: float = 0.0
    ready: float = 1.0  # how many of a rank's threads run, or wait for a processor, on average
    starved: float = 0.1  # the share of these that wait
    starved_before: float = 0.1  # the same, before the first step
    link: float = 100.0  # MB/s that its connections with other hosts carry


@dataclass
class Job:
    """What is recorded.

    Attributes:
        compute: seconds, of the shape (steps, ranks).
        quorum: arrivals that close a round; None is `Full()`.
        passes: micro-batches of a step for each rank, which the ranks share; 0 is no work sharing.
        first: seconds that a rank's first micro-batch of a step takes longer, of the shape (steps, ranks).
        loader: seconds of `compute` that a rank waits for data, of the shape (steps, ranks); the rest of `compute` is half
            forward and half backward. None is a recording without parts. With `Full()` only.
        reduce: seconds of a reduction.
        hosts: of the ranks, in order, again from the first where there are more ranks.
        late_ends: the share of the ends of reductions that a rank sees late, by up to 50 ms.
        carried: how much a link carries of the bytes that a rank hands over.
        segments: into how many files a rank's events are cut.
        ended: Horovod was shut down in good order.
        until: when the ranks stop, under a quorum, also if they have taken fewer steps than `compute` has.
    """

    compute: NDArray[np.float64]
    quorum: int | None = None
    passes: int = 0
    first: NDArray[np.float64] | None = None
    loader: NDArray[np.float64] | None = None
    reduce: float = 0.004
    hosts: list[Host] = field(default_factory=lambda: [Host("worker-0")])
    late_ends: float = 0.0
    carried: float = 1.5
    segments: int = 1
    ended: bool = True
    until: float = math.inf
    seed: int = 0
    run: str = RUN


Row = tuple[float, str, dict[str, Any]]  # when it was written, in which table, and its columns; times are the job's


def write(folder: Path, job: Job) -> Path:
    """Write the run. Returns its folder."""
    rows: dict[int, list[Row]] = defaultdict(list)
    rng = np.random.default_rng(job.seed)
    (_shared if job.passes else _full if job.quorum is None else _partial)(job, rows, rng)
    path = folder / job.run
    path.mkdir(parents=True)
    for rank in range(job.compute.shape[1]):
        _write_rank(path, job, rank, sorted(rows[rank], key=lambda row: row[0]))
    return path


def bucket_number(rank: int, bucket: int) -> int:
    return (bucket + rank) % len(BUCKETS)


def _reduction(job: Job, rows: dict[int, list[Row]], rng: np.random.Generator, **of: Any) -> NDArray[np.float64]:
    """One reduction of all ranks, with ends that some see late. Returns when each saw it."""
    ends = []
    for rank in range(job.compute.shape[1]):
        seen = of["end"] + rng.exponential(0.0002)
        seen += rng.uniform(0.005, 0.05) if rng.random() < job.late_ends else 0.0
        rows[rank].append((seen, "reductions", {"process_set": 0, "everyone": 1, **of, "end": seen}))
        ends.append(seen)
    return np.array(ends)


def _step(rows: dict[int, list[Row]], rank: int, **of: Any) -> None:
    """One step of a rank; under work sharing one micro-batch."""
    columns = {"bucket": bucket_number(rank, 0), "blocked": 0.0, "late": 0, "staleness": 0, "bytes": sum(NBYTES)}
    rows[rank].append((of["result"], "steps", columns | of))


def _full(job: Job, rows: dict[int, list[Row]], rng: np.random.Generator) -> None:
    begin = np.full(job.compute.shape[1], FIRST)
    for step, compute in enumerate(job.compute):
        handed = begin + compute
        end = _reduction(job, rows, rng, sequence=step, end=handed.max() + job.reduce)
        for rank, since in enumerate(begin):
            times = {"begin": since if step else None, "handed": handed[rank], "result": end[rank]}
            if job.loader is not None:
                loader = job.loader[step, rank] if step else -1e-6
                passes = (compute[rank] - loader) / 2 if step else -1e-6
                times |= dict(zip(PARTS, (loader, passes, passes, 0.0, 0.0), strict=True))
            _step(rows, rank, bucket=-1, step=step, round=-1, reduced=end[rank] - handed.max(), **times)
        begin = end


class _Rounds:
    """A quorum, in the protocol's words: on time, slipped and late arrivals, and pending sums that travel later."""

    def __init__(self, job: Job, rows: dict[int, list[Row]], rng: np.random.Generator) -> None:
        self.job, self.rows, self.rng = job, rows, rng
        self.size = job.compute.shape[1]
        self.round = 0
        self.busy_until = -1.0
        self.seen = [-1] * self.size
        self.pending = [False] * self.size
        self.waiting: dict[int, float] = {}
        self.steps = [0] * self.size
        self.began: list[float | None] = [None] * self.size
        self.queue = [(FIRST + job.compute[0, rank], rank) for rank in range(self.size)]

    def run(self) -> None:
        heapq.heapify(self.queue)
        while self.queue:
            time, rank = heapq.heappop(self.queue)
            self.arrive(time, rank)
            if not self.queue and self.waiting:
                self.close(max(self.waiting.values()), "liveness")

    def arrive(self, time: float, rank: int) -> None:
        slipped = time < self.busy_until
        if slipped or self.seen[rank] < self.round - 1:
            self.pending[rank] = True
            self.result(rank, time, self.busy_until if slipped else time, late=1)
            return
        self.waiting[rank] = time
        if len(self.waiting) >= self.quorum():
            self.close(time, "quorum" if self.round else "first")

    def quorum(self) -> int:
        return self.size if self.round == 0 or self.job.quorum is None else self.job.quorum

    def close(self, time: float, reason: str) -> None:
        missing = [rank for rank in range(self.size) if rank not in self.waiting]
        delivered = [rank for rank in missing if self.pending[rank]]
        reason = "everybody" if not missing and self.round else reason
        gradients = len(self.waiting) + sum(self.pending)
        for bucket in range(len(BUCKETS)):
            columns = {"bucket": bucket_number(0, bucket), "round": self.round, "time": time, "reason": reason}
            columns |= {"quorum": self.quorum(), "gradients": gradients, "missing": missing, "delivered": delivered}
            self.rows[0].append((time, "rounds", columns))
        end = time + self.job.reduce
        _reduction(self.job, self.rows, self.rng, sequence=self.round, end=end)
        self.busy_until = end
        self.round += 1
        self.pending = [False] * self.size
        for rank, since in sorted(self.waiting.items()):
            self.result(rank, since, end, late=0)
        self.waiting = {}

    def result(self, rank: int, since: float, end: float, late: int) -> None:
        missed = self.round - 2 - self.seen[rank] + late
        self.seen[rank] = self.round - 1
        times = {"begin": self.began[rank], "handed": since, "result": end}
        told = {"round": self.round - 1, "late": late, "staleness": max(missed, 0)}
        _step(self.rows, rank, step=self.steps[rank], reduced=min(end - since, self.job.reduce), **times, **told)
        end += WAKING if end > since else 0.0
        self.began[rank] = end
        self.steps[rank] += 1
        if self.steps[rank] < len(self.job.compute) and end < self.job.until:
            heapq.heappush(self.queue, (end + self.job.compute[self.steps[rank], rank], rank))


def _partial(job: Job, rows: dict[int, list[Row]], rng: np.random.Generator) -> None:
    _Rounds(job, rows, rng).run()


def _shared(job: Job, rows: dict[int, list[Row]], rng: np.random.Generator) -> None:
    """The rank that is free first makes the next micro-batch of a step."""
    begin, made = FIRST, [0] * job.compute.shape[1]
    for step, compute in enumerate(job.compute):
        late = np.zeros(len(compute)) if job.first is None else job.first[step].copy()
        free = [(begin, rank) for rank in range(len(compute))]
        steps = []
        for _ in range(job.passes * len(compute)):
            since, rank = min(free)
            time = since + compute[rank] / job.passes + late[rank]
            late[rank] = 0.0
            free[rank] = time, rank
            steps.append((rank, {"step": made[rank], "begin": since if made[rank] else None, "handed": time}))
            made[rank] += 1
        end = max(free)[0] + job.reduce
        _reduction(job, rows, rng, sequence=step, end=end)
        for rank, of in steps:
            is_last = of["handed"] == free[rank][0]  # before the others the rank was computing
            _step(rows, rank, result=end, reduced=job.reduce if is_last else 0.0, round=step, **of)
        begin = end + WAKING


def _write_rank(path: Path, job: Job, rank: int, rows: list[Row]) -> None:
    host = job.hosts[rank % len(job.hosts)]
    start = 0.01 * rank  # ranks begin to record one after the other

    def shown(time: float) -> float:
        return BOOT + host.offset + (1 + host.drift) * time

    def local(value: Any, column: str) -> Any:
        if column in ("blocked", "reduced", *PARTS):
            return round(1e6 * (1 + host.drift) * value)
        if column in ("time", "begin", "handed", "result", "end"):
            return -1 if value is None else round(1e6 * (shown(value) - shown(start)))
        return value

    header = {"format": "horovod_partial.recording", "version": 2, "run": job.run, "rank": rank, "host": host.name}
    header |= {"clock": host.name, "size": job.compute.shape[1], "pid": 4711 + rank}
    header |= {"wall": WALL + start + host.wall_error, "steady": round(1e6 * shown(start))}
    policy = repr(SharedUpdates(job.passes)) if job.passes else f"quorum:{job.quorum}"
    numbers = [bucket_number(rank, bucket) for bucket in range(len(BUCKETS))]
    buckets = {"table": "buckets", "bucket": numbers, "name": BUCKETS, "policy": [policy] * 2, "process_set": [0, 0]}
    buckets["bytes"] = NBYTES
    last = rows[-1][0]
    for segment in range(job.segments):
        lines: list[dict[str, Any]] = [header | {"segment": segment}]
        lines += [buckets] if job.quorum is not None or job.passes else []
        begin, end = last * segment / job.segments, last * (segment + 1) / job.segments
        tables: dict[tuple[int, str], dict[str, list[Any]]] = {}
        for time, table, columns in rows:
            if begin < time <= end:
                line = tables.setdefault((int(time), table), {})  # the writer writes once a second
                for column, value in columns.items():
                    line.setdefault(column, []).append(local(value, column))
        lines += [{"table": table, **columns} for (_, table), columns in tables.items()]
        passed = [begin, *([FIRST] if begin < FIRST < end else []), end]
        waited = [host.starved_before * min(time, FIRST) + host.starved * max(time - FIRST, 0.0) for time in passed]
        processor: dict[str, Any] = {"table": "processor", "time": [local(time, "time") for time in passed]}
        processor["ran"] = [round(1e6 * host.ready * (time - of)) for time, of in zip(passed, waited, strict=True)]
        processor["waited"] = [round(1e6 * host.ready * of) for of in waited]
        lines.append(processor)
        if segment == job.segments - 1:
            lines += _links(job, rank) if len(job.hosts) > 1 else []
        if job.ended and segment == job.segments - 1:
            lines.append({"table": "end", "time": [local(last, "time")]})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (path / f"rank-{rank}.{segment}.jsonl").write_text(text)


def _links(job: Job, rank: int) -> list[dict[str, Any]]:
    """Each host sends to the next one, and fetches its data from a server that is no host of the job."""
    number, after = (host % len(job.hosts) for host in (rank, rank + 1))
    carried = round(job.carried * sum(NBYTES) * len(job.compute))
    lines = []
    for to, rate in (f"10.0.0.{after}", min(job.hosts[number].link, job.hosts[after].link)), ("10.9.9.9", 1.0):
        line = {"from": [f"10.0.0.{number}"] * 3, "to": [to] * 3, "time": [0, 0, 0]}
        rates = [round(1e6 * rate), round(1e6 * rate), 300_000_000]  # a burst is faster than the link
        line |= {"bytes": [10**9, 10**9 + carried // 2, 10**9 + carried], "rate": rates}
        lines.append({"table": "links", **line})
    return lines


def even(steps: int, ranks: int, seconds: float = 0.1, noise: float = 0.02, seed: int = 0) -> NDArray[np.float64]:
    """Compute times of ranks that are alike, with log-normal noise; of the shape (steps, ranks)."""
    return seconds * np.random.default_rng(seed).lognormal(0.0, noise, (steps, ranks))
