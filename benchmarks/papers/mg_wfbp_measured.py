"""MG-WFBP on real ranks: what messages cost (figure 4), and steps under its plans on limited links."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import harness
import merging
import numpy as np
import simulator
from experiment import Job, Outcome, Plot, Row
from harness import namespaces

MEGABITS = merging.MEGABITS[
    "links400"
]  # of each link, at which eight ranks of ResNet-50's shapes take about 5 s for a step

# --- Figure 4 --------------------------------------------------------------------------------------------------------


def message_costs(job: Job) -> Outcome:
    """The least-squares line through the times of Horovod's allreduce, as in the paper."""
    where: list[tuple[str, int, Any]] = [
        (f"{ranks} ranks, one machine", ranks, nullcontext()) for ranks in job.choose((2, 4, 8), (2,))
    ]
    missing = namespaces.missing()
    if not (job.smoke or missing):
        limited = namespaces.limited_links(4, MEGABITS)
        where.append((f"4 ranks, links of {MEGABITS} Mbit/s", 4, limited))
    rows, series, r_squared, starts = [], {}, [], []
    bursts = False
    for place, ranks, links in where:
        with links as command:
            seconds = harness.launch(
                simulator.messages,
                ranks=ranks,
                transport=job.transport if command is None else "mpi",
                command=command,
                path="full",
                repeats=job.choose(60, 5),
            )
        slope, start = np.polyfit(simulator.SIZES, seconds, 1)
        bursts |= command is not None and start < 0
        starts.append(float(start))
        r_squared.append(float(np.corrcoef(simulator.SIZES, seconds)[0, 1] ** 2))
        rows += [
            Row(f"a, {place} (µs)", "972, 908, 236 (16 GPUs, three clusters)", 1e6 * start, "measured"),
            Row(f"b, {place} (ns/B)", "1.97, 0.74, 0.406", 1e9 * slope, "measured"),
            Row(f"R² of the line, {place}", "", r_squared[-1], "measured"),
        ]
        series[place] = ([size / 2**10 for size in simulator.SIZES], [1e3 * taken for taken in seconds])
    lines = sum(value >= 0.95 and start >= 0 for value, start in zip(r_squared, starts, strict=True))
    verdict = f"Messages cost a + b M, with an R² of 0.95 or more and an a of 0 or more, in {lines} of {len(r_squared)} cases."
    if bursts:
        verdict += " Limited links let a first burst pass at once, so that the line of larger messages begins below 0."
    if missing:
        verdict += f" No limited links: {missing}."
    return Outcome(rows, Plot("KiB", "ms", series, log_x=True, log_y=True), verdict, {"KiB and ms": series})


# --- Steps -----------------------------------------------------------------------------------------------------------

# By the names of benchmarks/merging.py. WFBP is Horovod itself, told to fuse nothing.
ARMS = {"WFBP": "per tensor", "SyncEASGD": "single message", "MG-WFBP": "paper", "exact plan": "exact"}
# What is how many times as fast as what, and the paper's figure for it.
GAINS = {
    ("MG-WFBP", "WFBP"): "1.2 (16 GPUs)",
    ("MG-WFBP", "SyncEASGD"): "1.36 (16 GPUs)",
    ("exact plan", "MG-WFBP"): "",
}


def steps(job: Job) -> Outcome:
    """Steps of benchmarks/merging.py: many small tensors on one machine, and ResNet-50's shapes on limited links."""
    missing = namespaces.missing()
    jobs = [("small", 2)] if job.smoke else [("small", 4), ("small", 8)]
    if not (job.smoke or missing):
        jobs.append(("links400", 4))
    arms = job.choose(tuple(ARMS), ("SyncEASGD", "MG-WFBP"))
    rows: list[Row] = []
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    gains: dict[tuple[str, str], list[float]] = {}
    seconds: dict[str, dict[str, list[list[float]]]] = {}
    for section, ranks in jobs:
        place = f"{section}, {ranks} ranks"
        measured = merging.measure(
            section,
            [ARMS[arm] for arm in arms],
            ranks=ranks,
            transport=job.transport,
            repeats=job.choose(5, 1),
            steps=job.choose(30, 3),
        )
        seconds[place] = {arm: [done["seconds"] for done in measured[ARMS[arm]]] for arm in arms}
        for arm in arms:
            times[arm].append(merging.median_step(measured[ARMS[arm]]))
            rows.append(Row(f"{place}: step, {arm} (ms)", "", 1e3 * times[arm][-1], "measured"))
        for (faster, slower), paper in GAINS.items():
            if faster in times and slower in times:
                gain = times[slower][-1] / times[faster][-1]
                gains.setdefault((faster, slower), []).append(gain)
                rows.append(Row(f"{place}: {faster} over {slower}", paper, gain, "measured"))
    told = [f"{one} over {other} {min(each):.2f} to {max(each):.2f} times" for (one, other), each in gains.items()]
    verdict = f"{'; '.join(told)}."
    behind = {pair: sum(gain < 0.98 for gain in each) for pair, each in gains.items()}
    if any(behind.values()):
        told = [
            f"{one} is behind {other} in {count} of {len(jobs)} jobs" for (one, other), count in behind.items() if count
        ]
        verdict += f" {'; '.join(told)}."
    if missing:
        verdict += f" No limited links: {missing}."
    plot = bars(times, [f"{section}, {ranks} ranks" for section, ranks in jobs])
    return Outcome(rows, plot, verdict, {"seconds": seconds})


def bars(times: dict[str, list[float]], jobs: Sequence[str]) -> Plot:
    series = {arm: ([float(place) for place in range(len(jobs))], values) for arm, values in times.items()}
    return Plot("", "step in s", series, bars=True, ticks=tuple(jobs))
