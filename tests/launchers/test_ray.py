"""Ours on Ray: `RayExecutor`, how settings come to its workers, what users do around a loop, and an elastic job."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import digits
import pytest
import sandbox

pytest.importorskip("ray", reason="needs Ray, which `make test-launchers` installs")

SECONDS = 400  # all jobs take some 190 on two busy cores
pytestmark = pytest.mark.timeout(SECONDS + 20)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> sandbox.Ran:
    folder = tmp_path_factory.mktemp("ray")
    return sandbox.ran("on_ray", folder, seconds=SECONDS, HOROVOD_PARTIAL_SYNC="quorum:3")


def test_training(ran: sandbox.Ran, check: Callable[[dict[str, Any]], None]) -> None:
    """With the policy of the executor, which comes before that of the driver."""
    results = ran.results["digits"]
    assert [result["rank"] for result in results] == list(range(digits.RANKS))
    for result in results:
        check(result)


def test_settings_of_the_driver_and_of_rank_0_alone(ran: sandbox.Ran) -> None:
    assert ran.results["of one"] == [["quorum:3", 5.0]] * digits.RANKS


def test_a_contradiction(ran: sandbox.Ran) -> None:
    ranks = ", ".join(f"quorum:3 on rank {rank}" for rank in range(1, digits.RANKS))
    assert f"ValueError: HOROVOD_PARTIAL_SYNC is {ranks}, but solo on rank 0" in ran.results["contradiction"]


def test_a_misspelt_variable(ran: sandbox.Ran) -> None:
    assert ran.results["misspelt"] == [["quorum:3", 25.0]] * digits.RANKS
    assert "HOROVOD_PARTIAL_SNYC is unknown to horovod_partial; did you mean HOROVOD_PARTIAL_SYNC?" in ran.screen


def test_an_unknown_policy(ran: sandbox.Ran) -> None:
    assert "ValueError: HOROVOD_PARTIAL_SYNC='most': unknown sync policy 'most'" in ran.results["unknown"]


def test_a_worker_that_fails(ran: sandbox.Ran) -> None:
    assert "RuntimeError: planned failure" in ran.results["failure"]


def test_unequal_data_and_a_schedule_over_two_runs(ran: sandbox.Ran) -> None:
    """The schedule moves with the mean of the ranks' steps, 35 in each run."""
    assert ran.results["resumed"] == [[70, 0.5**7, [20 + 10 * rank] * 2] for rank in range(digits.RANKS)]


def test_a_worker_of_an_elastic_job_is_killed(tmp_path: Path) -> None:
    done = sandbox.run("elastic_on_ray", tmp_path / "result.json", seconds=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "result.json").read_text()) == [[40, 2, True]] * 2
    assert "The actor died unexpectedly" in done.stdout + done.stderr
