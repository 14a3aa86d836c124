"""Runs a program of examples/torch/work on ranks that have a share of a core each, and brings back what it measured.

A rank must wait cheaply, or it spends its share on waiting. Over Gloo, Horovod's threads sleep while they wait for others;
over Open MPI they poll, and `mpi_yield_when_idle` is no help to a rank that is alone on its share. The thread that waits
for one of Horovod's own operations, as under `full`, asks for it in a loop, over both; here it sleeps in between.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import quota
from harness.launch import Transport, launch

PROGRAMS = Path(__file__).resolve().parents[2] / "examples" / "torch" / "work"
CYCLE_MS = 5  # of Horovod's background thread; with its default of 1 that takes some 5 % of a core, on each rank
POLL_SECONDS = 0.0005


def run_program(
    program: str,
    *,
    policy: str,
    rate: float,
    seed: int,
    ranks: int,
    transport: Transport,
    cores: Sequence[float] | None = None,
    options: Sequence[str] = (),
) -> dict[str, Any]:
    """Run a program once.

    Args:
        program: the name of its file.
        policy: as text.
        rate: of learning.
        seed: of all that is random.
        ranks: how many.
        transport: of Horovod.
        cores: of each rank; None leaves the machine to all of them.
        options: more of the program's own.

    Returns:
        What its last line says.

    Raises:
        LaunchError: a rank failed, or the job did not end in time.
        QuotaUnavailableError: there are no quotas here.
    """
    words = ["--policy", policy, "--rate", str(rate), "--seed", str(seed), *options]
    with contextlib.ExitStack() as stack:
        variables = {} if cores is None else stack.enter_context(quota.removed_afterwards())
        figures: dict[str, Any] = launch(
            run,
            ranks=ranks,
            transport=transport,
            environment={**variables, "HOROVOD_CYCLE_TIME": str(CYCLE_MS)},
            program=str(PROGRAMS / f"{program}.py"),
            words=words,
            cores=cores,
        )
    return figures


def run(program: str, words: list[str], cores: Sequence[float] | None) -> dict[str, Any] | None:
    """On every rank: be that program, on a share that begins when PyTorch is there. Returns rank 0's last line."""
    if cores is not None:
        quota.enter(cores)
    _wait_asleep()
    sys.argv = [program, *words]
    sys.path.insert(0, str(Path(program).parent))
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        runpy.run_path(program, run_name="__main__")
    lines = output.getvalue().splitlines()
    figures: dict[str, Any] | None = json.loads(lines[-1]) if lines else None
    return figures


def _wait_asleep() -> None:
    """Let a thread sleep while it waits for an operation of Horovod's own."""
    from horovod.torch.mpi_ops import mpi_lib

    wait = mpi_lib.horovod_torch_wait_and_clear

    def wait_and_clear(handle: int) -> None:
        while not mpi_lib.horovod_torch_poll(handle):
            time.sleep(POLL_SECONDS)
        wait(handle)

    mpi_lib.horovod_torch_wait_and_clear = wait_and_clear
