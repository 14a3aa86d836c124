"""Ours on Spark: `horovod.spark.run` over both transports, how settings come to its ranks, and what users do around a loop."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from typing import Any, NamedTuple

import digits
import pytest
import sandbox

pytest.importorskip("pyspark", reason="needs pyspark, which `make test-launchers` installs")
pytest.importorskip("pyarrow", reason="needs pyarrow, which `make test-launchers` installs")
if shutil.which("java") is None:
    pytest.skip("needs Java 17 or newer", allow_module_level=True)

SECONDS = 580  # all jobs take some 300 on two busy cores
# In a sandbox everybody is root, to whom Open MPI says no otherwise. Ranks outnumber cores, and are to yield them.
OPEN_MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
pytestmark = pytest.mark.timeout(SECONDS + 20)


class Ran(NamedTuple):
    """What came of the jobs of `on_spark.py`, and what was written to the screen."""

    results: dict[str, Any]
    screen: str


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    path = tmp_path_factory.mktemp("spark") / "results.json"
    done = sandbox.run("on_spark", path, seconds=SECONDS, HOROVOD_PARTIAL_SYNC="quorum:3", **OPEN_MPI)
    assert done.returncode == 0, done.stdout + done.stderr
    return Ran(json.loads(path.read_text()), done.stdout + done.stderr)


@pytest.mark.parametrize("job", ["digits", "digits over MPI"])
def test_training(ran: Ran, check: Callable[[dict[str, Any]], None], job: str) -> None:
    assert [result["rank"] for result in ran.results[job]] == list(range(digits.RANKS))
    for result in ran.results[job]:
        check(result)


def test_settings_of_the_driver(ran: Ran) -> None:
    assert ran.results["of the driver"] == [["quorum:3", 25.0]] * digits.RANKS
    assert "HOROVOD_PARTIAL_SNYC is unknown to horovod_partial; did you mean HOROVOD_PARTIAL_SYNC?" in ran.screen


def test_a_rank_that_fails(ran: Ran) -> None:
    assert "one or more processes exited with non-zero status" in ran.results["failure"]
    assert "RuntimeError: planned failure" in ran.screen


def test_unequal_data_and_a_schedule_over_two_runs(ran: Ran) -> None:
    """The schedule moves with the mean of the ranks' steps, 35 in each run."""
    assert ran.results["resumed"] == [[70, 0.5**7, [20 + 10 * rank] * 2] for rank in range(digits.RANKS)]
