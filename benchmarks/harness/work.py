"""Runs programs of examples/torch/work on ranks that have a share of a core each, and keeps what they measure.

The share is that of the threads in which the program computes. Horovod's threads are outside of it (see `harness.quota`).

A rank must wait cheaply, or it takes the cores from those that compute. Over Gloo, Horovod's threads sleep while they wait for
others; over Open MPI they poll. The thread that trains waits asleep, too, and saves its share (see `harness.waiting`).
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import quota
from harness.launch import Transport, launch
from harness.progress import progress
from harness.report import origin

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "torch" / "work"
CYCLE_MS = 5  # of Horovod's background thread; with its default of 1 that takes some 5 % of a core, on each rank
JOB_SECONDS = 600.0  # at most, of one program

Job = dict[str, Any]


def run_programs(
    jobs: Sequence[Job],
    results: Path,
    *,
    ranks: int,
    transport: Transport,
    cores: Sequence[float],
    cycle_ms: float = CYCLE_MS,
) -> None:
    """Run programs, one after another in one launch, and append a line for each to a file as soon as it has ended.

    Args:
        jobs: each with the `program`'s file name, its `policy` as text, `rate` of learning, `seed` of all that is random, and
            more of its own `options`.
        results: lines of JSON, each with the job, as `run` what the program's last line says, and the commit.
        ranks: how many.
        transport: of Horovod.
        cores: of each rank.
        cycle_ms: of Horovod's background thread.

    Raises:
        LaunchError: a rank failed, or the jobs did not end in time.
        QuotaUnavailableError: there are no quotas here.
    """
    with quota.removed_afterwards() as variables:
        launch(
            run,
            ranks=ranks,
            transport=transport,
            asleep=True,
            timeout=JOB_SECONDS * len(jobs),
            environment={**variables, "HOROVOD_CYCLE_TIME": f"{cycle_ms:g}"},
            jobs=list(jobs),
            results=str(results.resolve()),
            cores=list(cores),
            commit=origin()["commit"],
        )


def run(jobs: Sequence[Job], results: str, cores: Sequence[float], commit: str | None) -> None:
    """On every rank: be those programs, on a share that begins when PyTorch and Horovod's threads are there."""
    quota.enter(cores)
    sys.path.insert(0, str(FOLDER))
    for job in jobs:
        text = "{program}, {policy}, rate {rate:g}, seed {seed}".format(**job)
        progress(text, 0, 1)
        program = str(FOLDER / f"{job['program']}.py")
        sys.argv = [program, "--policy", job["policy"], "--rate", str(job["rate"]), "--seed", str(job["seed"])]
        sys.argv += job["options"]
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            runpy.run_path(program, run_name="__main__")
        lines = output.getvalue().splitlines()
        if lines:  # on rank 0
            with Path(results).open("a") as file:
                file.write(json.dumps({"job": job, "run": json.loads(lines[-1]), "commit": commit}) + "\n")
        gc.collect()  # the optimizer's buckets end
        progress(text, 1, 1)
