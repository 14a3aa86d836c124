"""Jobs of real ranks with faults. The default run has a few seeds of each transport; `run.py` runs as many as one likes."""

from __future__ import annotations

import shutil

import pytest
from plan import FATAL, LEAVING, PASSING, draw
from run import run_here

KINDS = (*PASSING, *LEAVING, *FATAL, "none")
# Of each seed's job one kind of fault is the last: 7 kills at a step, 25 in a flush, 43 while groups are made.
DEFAULT = {"gloo": (25, 1, 6, 15), "mpi": (43, 0, 16, 11)}
FULL = range(3 * len(KINDS))


def test_the_seeds_go_through_all_kinds_and_moments() -> None:
    plans = [draw(seed, "gloo") for seed in range(4 * len(KINDS))]
    drawn = {(fault.kind, fault.moment) for plan in plans for fault in plan.faults}
    assert {kind for kind, _ in drawn} == set(KINDS) - {"none"}
    assert {moment for kind, moment in drawn if kind == "SIGKILL"} == {"step", "flush", "groups", "exit"}
    assert any(fault.kind == "SIGKILL" and fault.rank == 0 for plan in plans for fault in plan.faults)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        full = metafunc.config.getoption("matrix") == "full"
        chosen = [
            (transport, seed)
            for transport, few in DEFAULT.items()
            if metafunc.config.getoption("transport") in (None, transport)
            for seed in (FULL if full else few)
        ]
        metafunc.parametrize(("transport", "seed"), chosen)


@pytest.mark.timeout(300)
def test_a_job_with_faults(transport: str, seed: int) -> None:
    if transport == "mpi" and shutil.which("mpirun") is None:
        pytest.skip("no mpirun was found")
    result = run_here(draw(seed, transport, longest_seconds=2.0))
    assert not result["problems"], result
