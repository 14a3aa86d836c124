"""Command lines, tables and JSON files that look alike in every benchmark."""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.files import replace
from harness.launch import default_transport

_TOP = Path(__file__).resolve().parents[2]
_PACKAGES = ("horovod", "torch", "tensorflow", "keras", "numpy")
_VARIABLES = ("HOROVOD_", "KERAS_")  # beginnings of the names of those that are kept
_BUSY = 0.25  # the share of the cores from which on figures are marked


def arguments(description: str | None, *, ranks: int, device: bool = False) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has, `--ranks`, `--transport` and `--json`; some have `--device` and `--quick`."""
    origin()  # before anything is measured
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--ranks", type=int, default=ranks, help="processes to start")
    parser.add_argument("--transport", choices=["mpi", "gloo"], default=default_transport(), help="of Horovod")
    if device:
        parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where PyTorch's tensors lie")
        parser.add_argument("--quick", action="store_true", help="measure less: within 45 s with 4 ranks on one GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    return parser


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; all but its first column hold numbers."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def write_json(file: Path | None, figures: dict[str, Any]) -> None:
    """Write the figures and where they come from, if a file was asked for."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace(file, json.dumps({**figures, "about": {**origin(), "load_after": os.getloadavg()[0]}}, indent=2) + "\n")


@functools.cache
def origin() -> dict[str, Any]:
    """Say where figures come from. `busy`: other processes took more than a quarter of the cores in the second before.

    What is found at the first call stays, so sources that are changed while a benchmark runs do not count. The load averages are
    those of a minute: the first one counts what ran before, and the last one the benchmark itself.
    """
    in_use = _cores_in_use()
    script, *rest = sys.argv
    for option in {"--json", "--output"}.intersection(rest):  # where files go, which has nothing to do with the figures
        del rest[rest.index(option) : rest.index(option) + 2]
    cores = len(os.sched_getaffinity(0))
    return {
        "command": shlex.join([os.path.relpath(script, _TOP), *rest]),
        "environment": {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)},
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "cores": cores,
        "commit": _git("rev-parse", "--short", "HEAD"),
        "changed_sources": _git("status", "--porcelain", "--", "*.py", "*.cc", "*.h") or "",
        "load_before": os.getloadavg()[0],
        "cores_in_use_before": in_use,
        "busy": in_use > _BUSY * cores,
    }


def _cores_in_use(seconds: float = 1.0) -> float:
    """The mean number of cores that were not idle in this time, of the whole machine."""

    def ticks() -> tuple[int, int]:
        cores, *_ = Path("/proc/stat").read_text().splitlines()
        # user, nice, system, idle, waiting for disks, and others
        spent = [int(number) for number in cores.split()[1:9]]
        return sum(spent), spent[3] + spent[4]

    all_before, idle_before = ticks()
    time.sleep(seconds)
    all_after, idle_after = ticks()
    return (os.cpu_count() or 1) * (1 - (idle_after - idle_before) / (all_after - all_before))


def _git(*arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(_TOP), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
