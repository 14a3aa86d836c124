"""Which tests run with how many ranks, over which transport, with which environment."""

import shutil
from dataclasses import dataclass, field
from typing import Any

import pytest

from harness import hosts

TRANSPORTS = ("gloo", "mpi")
DEFAULT_RANKS = (4,)
FULL_RANKS = (2, 4, 8)
MOST_RANKS = {"torch": 32, "tensorflow": 4}  # which takes a gigabyte on each rank, and seconds to be imported
STEADY = {"PARTIAL_TEST_STEADY": "1"}  # see `rank.let_no_time_count`

# Marks of tests that several files have.
_SCRIPTED = {"label": "scripted", "environment": STEADY | {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}}
scripted = pytest.mark.launch(**_SCRIPTED)
process_sets = pytest.mark.launch(**_SCRIPTED, full_ranks=(4,))  # in the same launch
four = pytest.mark.launch(full_ranks=(4,))
# One rank, without `horovodrun`: what needs no other rank.
alone = pytest.mark.launch(ranks=(1,), transports=("none",))
# Front ends do not depend on the transport below them, and little on the number of ranks.
OVER_MPI = {"transports": ("mpi",), "full_transports": TRANSPORTS}
FRONT_END = {**OVER_MPI, "full_ranks": (4,)}
front_end = pytest.mark.launch(**FRONT_END)
WITH_TWO_RANKS = {**OVER_MPI, "ranks": (2,), "full_ranks": (2, 4)}
keras_front_end = pytest.mark.launch(**WITH_TWO_RANKS, framework="tensorflow")
keras_on_torch = pytest.mark.launch(**WITH_TWO_RANKS)
# Of Keras's tests on both backends: `make test` has this one on PyTorch, where no graph has to be traced.
mainly_on_torch = pytest.mark.full_matrix("tensorflow")


def long_cases(*values: Any) -> list[Any]:
    """Values of a parameter that `make test` leaves to `make test-all`."""
    return [pytest.param(value, marks=pytest.mark.full_matrix) for value in values]


# Horovod without what makes it quick.
SLOWEST = {"HOROVOD_CACHE_CAPACITY": "0", "HOROVOD_FUSION_THRESHOLD": "0"}
bare = pytest.mark.launch(**WITH_TWO_RANKS, label="bare", environment=SLOWEST)


@dataclass(frozen=True, order=True)
class Setup:
    """What the ranks of one launch have in common."""

    transport: str
    ranks: int
    label: str = ""  # what is special about this environment
    environment: tuple[tuple[str, str], ...] = ()
    double: str = ""  # a library of `doubles/` that is preloaded into the ranks
    framework: str = "torch"  # whose Horovod is initialised, and which is Keras's backend
    hosts: int = 1  # see `hosts.py`
    usual: bool = field(default=True, compare=False)  # part of the default run

    def __str__(self) -> str:
        hosts = f"{self.hosts}hosts" if self.hosts > 1 else ""
        return "-".join(filter(None, [self.transport, str(self.ranks), hosts, self.label]))

    @property
    def unavailable(self) -> str | None:
        """Why this cannot run here, or None."""
        if self.transport == "mpi" and shutil.which("mpirun") is None:
            return "no mpirun was found, so the MPI paths are not tested"
        return hosts.unavailable() if self.hosts > 1 else None


def setups_of(definition: pytest.Item | Any, config: pytest.Config, **defaults: Any) -> list[Setup]:
    """The setups that a test function asks for with `@pytest.mark.launch(...)`; the closest mark wins over `defaults`.

    `ranks` and `transports` are tuples; with `--matrix=full` `full_ranks` and `full_transports` are used, which are
    `ranks` and `transports` where only those are given. `--transport` chooses among `full_transports`, and `--ranks`
    among `full_ranks`, whose setups then count as usual. `environment` is a dictionary, and `label` names it. With `hosts`
    of 2 or more the ranks are spread over so many. `double` names a file of `doubles/`. `framework` is `"torch"`, or
    `"tensorflow"` for Keras too.
    """
    options = dict(defaults)
    for mark in reversed(list(definition.iter_markers("launch"))):
        for kind in ("ranks", "transports"):
            if kind in mark.kwargs:
                options[f"full_{kind}"] = mark.kwargs[kind]
        options.update(mark.kwargs)
    several = {"ranks": (DEFAULT_RANKS, FULL_RANKS), "transports": (TRANSPORTS, TRANSPORTS)}
    unknown = set(options) - {*several, *(f"full_{kind}" for kind in several), *Setup.__dataclass_fields__}
    if unknown:
        raise pytest.UsageError(f"unknown arguments of the mark launch: {', '.join(sorted(unknown))}")
    full = config.getoption("matrix") == "full"
    chosen, chosen_ranks = config.getoption("transport"), config.getoption("ranks")
    asked = {"ranks": chosen_ranks, "transports": chosen}
    usual = {}
    for kind, (default, default_full) in several.items():
        for_full, usual[kind] = options.pop(f"full_{kind}", default_full), options.pop(kind, default)
        options[kind] = for_full if full or asked[kind] else usual[kind]
    ranks, transports = options.pop("ranks"), options.pop("transports")
    options["hosts"] = config.getoption("hosts") or options.get("hosts", 1)
    options["environment"] = tuple(sorted(options.get("environment", {}).items()))
    return [
        Setup(
            transport,
            count,
            **options,
            usual=bool(chosen_ranks) or (transport in (chosen, *usual["transports"]) and count in usual["ranks"]),
        )
        for transport in transports
        if transport in (chosen, "none") or chosen is None
        for count in ranks
        if chosen_ranks is None or transport == "none" or count == chosen_ranks
        if options["hosts"] <= count <= MOST_RANKS[options.get("framework", "torch")]
    ]
