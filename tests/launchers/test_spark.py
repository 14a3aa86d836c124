"""Ours on Spark: `horovod.spark.run` over both transports, how settings come to its ranks, and what users do around a loop."""

import shutil
from collections.abc import Callable
from typing import Any

import digits
import pytest
import sandbox
from harness.launch import OPEN_MPI

pytest.importorskip("pyspark", reason="needs pyspark, which `make test-launchers` installs")
pytest.importorskip("pyarrow", reason="needs pyarrow, which `make test-launchers` installs")
if shutil.which("java") is None:
    pytest.skip("needs Java 17 or newer", allow_module_level=True)

SECONDS = 580  # all jobs take some 300 on two busy cores
pytestmark = pytest.mark.timeout(SECONDS + 20)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> sandbox.Ran:
    folder = tmp_path_factory.mktemp("spark")
    return sandbox.ran("on_spark", folder, seconds=SECONDS, HOROVOD_PARTIAL_SYNC="quorum:3", **OPEN_MPI)


@pytest.mark.parametrize("job", ["digits", "digits over MPI"])
def test_training(ran: sandbox.Ran, check: Callable[[dict[str, Any]], None], job: str) -> None:
    assert [result["rank"] for result in ran.results[job]] == list(range(digits.RANKS))
    for result in ran.results[job]:
        check(result)


def test_settings_of_the_driver(ran: sandbox.Ran) -> None:
    assert ran.results["of the driver"] == [["quorum:3", 25.0]] * digits.RANKS
    assert "HOROVOD_PARTIAL_SNYC is unknown to horovod_partial; did you mean HOROVOD_PARTIAL_SYNC?" in ran.screen


def test_a_rank_that_fails(ran: sandbox.Ran) -> None:
    assert "one or more processes exited with non-zero status" in ran.results["failure"]
    assert "RuntimeError: planned failure" in ran.screen


def test_unequal_data_and_a_schedule_over_two_runs(ran: sandbox.Ran) -> None:
    """The schedule moves with the mean of the ranks' steps, 35 in each run."""
    assert ran.results["resumed"] == [[70, 0.5**7, [20 + 10 * rank] * 2] for rank in range(digits.RANKS)]
