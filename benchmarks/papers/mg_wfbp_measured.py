"""MG-WFBP on real ranks: what messages cost (figure 4)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import harness
import merging
import numpy as np
import simulator
from experiment import Job, Outcome, Plot, Row
from harness import namespaces

MEGABITS = merging.MEGABITS["links400"]  # of each link


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
