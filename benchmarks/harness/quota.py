"""A share of a core for each rank: a Linux cgroup around the rank's process.

    PYTHONPATH=benchmarks horovodrun -np 4 --gloo \\
        python -m harness.quota --cores 0.5 0.5 0.5 0.5 -- python examples/torch/work/lstm.py

Makes a cgroup with the share of its rank, moves into it, and becomes the program behind `--`. It needs root. All threads of
a rank live on its share, Horovod's too. Without quotas ranks that outnumber cores lend each other what they do not use
while they wait, and no policy can be faster than waiting.
"""

from __future__ import annotations

import argparse
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


def limits(version: int, cores: float) -> dict[str, str]:
    """The files of a cgroup that give it a share, and their texts, in the order in which they are written.

    Raises:
        ValueError: Linux has no quota as small as that.
    """
    quota = round(cores * PERIOD_US)
    if quota < SMALLEST_QUOTA_US:
        raise ValueError(f"a rank needs {SMALLEST_QUOTA_US / PERIOD_US:g} cores or more, not {cores:g}")
    if version == 2:
        return {"cpu.max": f"{quota} {PERIOD_US}"}
    return {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": str(quota)}


def enter(cores: Sequence[float]) -> None:
    """Move this rank's process into a cgroup with its share of `cores`, and remove those of launchers that are gone.

    Raises:
        QuotaUnavailableError: there are no cgroups here that can be used.
        ValueError: Linux has no quotas as small as that.
    """
    folder, version = _place()
    rank = int(os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
    texts = limits(version, cores[rank])
    for left in folder.glob(f"{_PREFIX}.*"):
        if not Path("/proc", left.name.split(".")[1]).exists():
            with contextlib.suppress(OSError):  # in use, or another rank was quicker
                left.rmdir()
    group = folder / f"{_PREFIX}.{os.environ.get(_LAUNCHER, os.getppid())}.{rank}"
    group.mkdir(exist_ok=True)
    for file, text in texts.items():
        (group / file).write_text(text)
    (group / "cgroup.procs").write_text(str(os.getpid()))


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
            return group.rmdir()
        except OSError:  # busy, until the last of them has ended
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=float, nargs="+", required=True, help="of each rank")
    parser.add_argument("program", nargs="+", help="and its arguments, behind `--`")
    options = parser.parse_args()
    if sum(options.cores) > (os.cpu_count() or 1) + 1e-6:
        parser.error(f"{sum(options.cores):g} cores are asked for, and there are {os.cpu_count()}")
    enter(options.cores)
    os.execvp(options.program[0], options.program)


if __name__ == "__main__":
    main()
