"""Starts the exchange of heartbeats, which tell when a rank is missing (docs/protocol.md, rules 13 and 14)."""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from horovod_partial import _attach, log
from horovod_partial.settings import settings

Gather = Callable[[str], list[str]]


def begin(rank: int, size: int, gather: Gather) -> _attach.Monitor | None:
    """Begin to watch the other ranks (on rank 0), or rank 0 (on the others), by heartbeats. All ranks must call this.

    Ranks are watched until the returned monitor is dropped. `gather` sends a text to all ranks, and returns all texts
    by rank. Returns None if the settings ask for no heartbeats, or there is only one rank, or some rank cannot reach
    rank 0. In this last case every rank raises ValueError instead if HOROVOD_PARTIAL_ABORT_SECONDS is set; the message
    names the ranks and the addresses.
    """
    config = settings()
    if size == 1 or not (config.abort_seconds or config.stall_seconds or config.watches_steps):
        return None
    _prepare_stacks()
    # Process numbers of the other ranks on this host. A rank that stops giving signs of life is killed by its number.
    neighbours = _neighbours(rank, gather) if config.abort_seconds else {}
    options = {"abort_seconds": config.abort_seconds, "neighbours": neighbours}
    monitor, problem = None, ""
    # Where rank 0 listens (empty: nowhere), and after how many seconds a wait is explained (0: never).
    endpoint, stall_seconds = "", _stall_seconds()
    if rank == 0 and (config.abort_seconds or stall_seconds or config.watches_steps):
        monitor, problem = _attempt(_attach.Monitor.listen, size, stall_seconds=stall_seconds, **options)
        endpoint = monitor.endpoint if monitor else ""
    endpoint, stall_seconds = json.loads(gather(json.dumps([endpoint, stall_seconds]))[0])
    if rank > 0 and endpoint:
        monitor, problem = _attempt(_attach.Monitor.join, rank, endpoint, stall_seconds=stall_seconds, **options)
    problems = {of: text for of, text in enumerate(gather(problem)) if text}
    if not problems:
        return monitor
    told = "; ".join(f"rank {of}: {text}" for of, text in problems.items())
    if config.abort_seconds:
        raise ValueError(
            f"the ranks cannot give each other signs of life, which HOROVOD_PARTIAL_ABORT_SECONDS needs: {told}. Let them "
            "reach rank 0's host on any port, or leave the variable out"
        )
    if rank == 0:
        log.logger.warning(
            "the ranks cannot give each other signs of life, so long waits will not be explained: %s. Let them reach rank "
            "0's host on any port, or set HOROVOD_PARTIAL_STALL_SECONDS=0",
            told,
        )
    return None


def _stall_seconds() -> float:
    """Return HOROVOD_PARTIAL_STALL_SECONDS, or 0 if HOROVOD_STALL_CHECK_DISABLE begins with a number above 0."""
    disabled = re.match(r"\s*\+?0*[1-9]", os.environ.get("HOROVOD_STALL_CHECK_DISABLE", ""))
    return 0.0 if disabled else settings().stall_seconds


@functools.cache
def _prepare_stacks() -> None:
    """Let the C++ extension write the Python stacks of all threads, even while a thread keeps the interpreter's lock."""
    signal, file = _attach.prepare_stacks()
    if signal:
        faulthandler.register(signal, file, all_threads=True)


def _neighbours(rank: int, gather: Gather) -> dict[int, int]:
    """Return the process numbers of the other ranks in this process namespace, by rank."""
    try:
        place = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:  # some sandboxes hide the files of /proc that tell which processes share a host
        place = None
    others = enumerate(map(json.loads, gather(json.dumps([place, os.getpid()]))))
    return {of: number for of, (its_place, number) in others if its_place == place is not None and of != rank}


def _attempt(make: Callable[..., _attach.Monitor], *args: Any, **options: Any) -> tuple[_attach.Monitor | None, str]:
    """Make a monitor of heartbeats. Returns the monitor and an empty text, or None and what went wrong."""
    try:
        return make(*args, **options), ""
    except RuntimeError as error:
        return None, str(error)
