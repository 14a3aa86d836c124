"""Jobs of real ranks with faults. The default run has a few seeds of each transport; `run.py` runs as many as one likes."""

import pytest
from jobs import Setup
from plan import FATAL, LEAVING, MOMENTS, PASSING, SHARING_MOMENTS, draw
from run import run_here
from soak import Soak

KINDS = (*PASSING, *LEAVING, *FATAL, "none")
# A rank is killed in a flush, is stopped for good; leaves shared updates, has no memory left.
DEFAULT = {"gloo": (26, 36), "mpi": (6, 16)}
FULL = range(3 * len(KINDS))


def test_the_seeds_go_through_all_kinds_and_moments() -> None:
    plans = [draw(seed, "gloo") for seed in range(8 * len(KINDS))]
    drawn = {(fault.kind, fault.moment) for plan in plans for fault in plan.faults}
    assert {kind for kind, _ in drawn} == set(KINDS) - {"none"}
    assert {moment for kind, moment in drawn if kind == "SIGKILL"} >= set(MOMENTS["SIGKILL"])
    assert any(fault.kind == "SIGKILL" and fault.rank == 0 for plan in plans for fault in plan.faults)


def test_the_seeds_of_work_sharing_go_through_all_moments() -> None:
    plans = [draw(seed, "gloo", load="sharing") for seed in range(5 * len(KINDS))]
    drawn = {(fault.kind, fault.moment) for plan in plans for fault in plan.faults}
    assert {plan.policy for plan in plans} == {"work_sharing"}
    assert drawn >= {(kind, moment) for kind, moments in SHARING_MOMENTS.items() for moment in moments}


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
    if reason := Setup(transport, 1).unavailable:
        pytest.skip(reason)
    result = run_here(draw(seed, transport, longest_seconds=2.0))
    assert not result["problems"], result


@pytest.mark.timeout(300)
def test_a_short_soak(request: pytest.FixtureRequest) -> None:
    transport = "gloo" if Setup("mpi", 1).unavailable else "mpi"
    soak = Soak(transport, ranks=4, seed=0, first_window=0)
    soak.run(seconds=20 if request.config.getoption("matrix") == "full" else 6)
    assert not soak.problems, soak.problems
    assert soak.rounds > 100
