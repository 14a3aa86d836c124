"""Signs of life between the ranks, by which a job ends when one of them is missing (docs/protocol.md, rule 13)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from horovod_partial import _attach
from horovod_partial.settings import settings

Gather = Callable[[str], list[str]]


def begin(rank: int, size: int, gather: Gather) -> _attach.Monitor | None:
    """Watch over the other ranks, or over rank 0, until the monitor is dropped. All ranks call this together.

    Args:
        rank: this one.
        size: how many ranks there are.
        gather: gives every rank's text to all, by rank.

    Returns:
        The monitor; None where none was asked for, or nobody is there to be missed.

    Raises:
        ValueError: some rank cannot reach rank 0; the same on every rank, with the ranks and the addresses.
    """
    seconds = settings().abort_seconds
    if seconds == 0 or size == 1:
        return None
    neighbours = _neighbours(rank, gather)
    monitor, problem = None, ""
    if rank == 0:
        monitor, problem = _attempt(lambda: _attach.Monitor.listen(size, seconds, neighbours))
    endpoint = gather(monitor.endpoint if monitor else "")[0]
    if rank > 0 and endpoint:
        monitor, problem = _attempt(lambda: _attach.Monitor.join(rank, seconds, neighbours, endpoint))
    problems = {of: text for of, text in enumerate(gather(problem)) if text}
    if problems:
        told = "; ".join(f"rank {of}: {text}" for of, text in problems.items())
        raise ValueError(
            f"the ranks cannot give each other signs of life, which HOROVOD_PARTIAL_ABORT_SECONDS needs: {told}. Let them "
            "reach rank 0's host on any port, or leave the variable out"
        )
    return monitor


def _neighbours(rank: int, gather: Gather) -> dict[int, int]:
    """The numbers of the processes of the other ranks that this one sees under the same numbers."""
    try:
        place = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:  # not told here, as in some sandboxes
        place = None
    others = enumerate(map(json.loads, gather(json.dumps([place, os.getpid()]))))
    return {of: number for of, (its_place, number) in others if its_place == place is not None and of != rank}


def _attempt(make: Callable[[], _attach.Monitor]) -> tuple[_attach.Monitor | None, str]:
    try:
        return make(), ""
    except RuntimeError as error:
        return None, str(error)
