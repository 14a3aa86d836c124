"""Which tests run with how many ranks, over which transport, with which environment."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import Any

import pytest

TRANSPORTS = ("gloo", "mpi")
DEFAULT_RANKS = (4,)
FULL_RANKS = (2, 4, 8)


@dataclass(frozen=True, order=True)
class Setup:
    """What the ranks of one launch have in common."""

    transport: str
    ranks: int
    label: str = ""  # what is special about this environment
    environment: tuple[tuple[str, str], ...] = ()
    double: str = ""  # a library of `doubles/` that is preloaded into the ranks
    framework: str = "torch"  # whose Horovod is initialised

    def __str__(self) -> str:
        return "-".join(filter(None, [self.transport, str(self.ranks), self.label]))

    @property
    def unavailable(self) -> str | None:
        """Why this cannot run here, or None."""
        if self.transport == "mpi" and shutil.which("mpirun") is None:
            return "no mpirun was found, so the MPI paths are not tested"
        return None


def setups_of(definition: pytest.Item | Any, config: pytest.Config) -> list[Setup]:
    """The setups that a test function asks for with `@pytest.mark.launch(...)`; the closest mark wins.

    `ranks` and `transports` are tuples; `full_ranks` is used with `--matrix=full`, and is `ranks` where those are given;
    `environment` is a dictionary, and `label` names it. `double` names a file of `doubles/`. `framework` is `"torch"`, or
    `"tensorflow"` for Keras too.
    """
    options: dict[str, Any] = {}
    for mark in reversed(list(definition.iter_markers("launch"))):
        if "ranks" in mark.kwargs:
            options["full_ranks"] = mark.kwargs["ranks"]
        options.update(mark.kwargs)
    unknown = set(options) - {"ranks", "full_ranks", "transports", "environment", "label", "double", "framework"}
    if unknown:
        raise pytest.UsageError(f"unknown arguments of the mark launch: {', '.join(sorted(unknown))}")
    full = config.getoption("matrix") == "full"
    ranks = options.get("full_ranks", FULL_RANKS) if full else options.get("ranks", DEFAULT_RANKS)
    chosen = config.getoption("transport")
    transports = [name for name in options.get("transports", TRANSPORTS) if chosen in (None, name)]
    environment = tuple(sorted(options.get("environment", {}).items()))
    label = options.get("label", "")
    double, framework = options.get("double", ""), options.get("framework", "torch")
    return [
        Setup(transport, count, label, environment, double, framework) for transport in transports for count in ranks
    ]
