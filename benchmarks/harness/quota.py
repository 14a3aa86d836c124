"""A share of a core for the threads in which a rank computes: a Linux cgroup around them. It needs root.

Without quotas ranks that outnumber cores lend each other what they do not use while they wait, and no policy can be faster
than waiting.

Horovod's threads are outside of the quota, under all policies alike. A quota stops all threads in it at once, as soon as they
have used it up. So a rank that computes would keep Horovod's threads from running for half of the time, which they would not
wait where the network has a core. A thread starts in the cgroup of the thread that starts it. So what `hvd.init()` has started
is outside if the quota begins after it, and what those threads start is outside, too. The main thread is in the quota, and so
is what it starts later: threads of PyTorch, of autograd, and processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

PERIOD_US = 10_000  # in which a rank gets its share; short against a step
SMALLEST_QUOTA_US = 1_000  # that Linux takes

_ROOT = Path("/sys/fs/cgroup")
_PREFIX = "horovod-partial"
_LAUNCHER = "HARNESS_QUOTA_LAUNCHER"  # the variable that tells ranks who removes their cgroups
_REMOVAL_SECONDS = 10.0
_THREADED = "computing"  # the cgroup of version 2 within that of a rank
_CALLER = "0"  # the thread that writes it, or its process


class QuotaUnavailableError(RuntimeError):
    """No quotas can be had here; the message says why."""


class Place(NamedTuple):
    """A cgroup below which others can be made, and the version of their interface."""

    folder: Path
    version: int


def unavailable() -> str | None:
    """Why no quotas can be had here, or None if they can."""
    try:
        place = _place()
    except QuotaUnavailableError as reason:
        return str(reason)
    return None if os.geteuid() == 0 and os.access(place.folder, os.W_OK) else "quotas need root"


def writes(version: int, cores: float) -> dict[str, str]:
    """The files of a rank's cgroup that give a share to the calling thread, and their texts, in the order of writing.

    Version 2 takes single threads only in a threaded cgroup, whose parent has the other threads of their process.

    Raises:
        ValueError: Linux has no quota as small as that.
    """
    quota = round(cores * PERIOD_US)
    if quota < SMALLEST_QUOTA_US:
        raise ValueError(f"a rank needs {SMALLEST_QUOTA_US / PERIOD_US:g} cores or more, not {cores:g}")
    if version == 1:
        return {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": str(quota), "tasks": _CALLER}
    return {
        "cgroup.procs": _CALLER,
        f"{_THREADED}/cgroup.type": "threaded",
        "cgroup.subtree_control": "+cpu",
        f"{_THREADED}/cpu.max": f"{quota} {PERIOD_US}",
        f"{_THREADED}/cgroup.threads": _CALLER,
    }


def enter(cores: Sequence[float]) -> None:
    """Move the calling thread into a cgroup with its rank's share of `cores`, and remove those of launchers that are gone.

    Other threads that this process has by now stay outside of the share.

    Raises:
        QuotaUnavailableError: there are no cgroups here that can be used.
        ValueError: Linux has no quotas as small as that.
    """
    folder, version = _place()
    rank = int(os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
    texts = writes(version, cores[rank])
    for left in folder.glob(f"{_PREFIX}.*"):
        if not Path("/proc", left.name.split(".")[1]).exists():
            with contextlib.suppress(OSError):  # in use, or another rank was quicker
                _remove_folders(left)
    group = folder / f"{_PREFIX}.{os.environ.get(_LAUNCHER, os.getppid())}.{rank}"
    for name, text in texts.items():
        file = group / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)


@contextlib.contextmanager
def removed_afterwards() -> Iterator[dict[str, str]]:
    """Gives the variables with which ranks are started; at the end their cgroups are removed, and what is left in them killed.

    Raises:
        QuotaUnavailableError: there are no cgroups here that can be used.
    """
    folder = _place().folder
    try:
        yield {_LAUNCHER: str(os.getpid())}
    finally:
        for group in folder.glob(f"{_PREFIX}.{os.getpid()}.*"):
            _remove(group)


def _remove(group: Path) -> None:
    deadline = time.monotonic() + _REMOVAL_SECONDS
    while True:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        try:
            return _remove_folders(group)
        except OSError:  # busy, until the last of them has ended
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _remove_folders(group: Path) -> None:
    for folder in (group / _THREADED, group):
        if folder.exists():
            folder.rmdir()


def _place() -> Place:
    reason = "there are no cgroups here"
    file = Path("/proc/self/cgroup")
    for line in file.read_text().splitlines() if file.exists() else []:
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):
            own = _ROOT / "cpu" / path.lstrip("/")
            return Place(own if own.exists() else _ROOT / "cpu", 1)  # in a container the path may be the host's
        if not controllers and (_ROOT / "cgroup.controllers").exists():
            own = _ROOT / path.lstrip("/")
            for folder in (own, *own.parents):
                handed_on = folder / "cgroup.subtree_control"
                if handed_on.exists() and "cpu" in handed_on.read_text().split():
                    return Place(folder, 2)
            reason = "no cgroup around this process hands on the control of the CPU"
    raise QuotaUnavailableError(reason)
