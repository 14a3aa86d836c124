"""What tests of launchers share: the variables of the job, and what its result must be."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import digits
import pytest

JOB = Path(digits.__file__)
sys.path.append(str(JOB.parents[1] / "parallel"))  # for `harness.hosts`
VARIABLES = {"HOROVOD_PARTIAL_SYNC": "majority", "OMP_NUM_THREADS": "1"}
SECONDS = 400  # a job takes some twenty alone; ranks outnumber cores, and other work may share these
TOLERANCE = 0.03  # of the accuracy: 450 images, and no two runs under Majority have the same rounds


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The accuracy that the job reaches by `horovodrun`."""
    path = tmp_path_factory.mktemp("reference") / "result.json"
    horovodrun = Path(sys.executable).with_name("horovodrun")
    command = [str(horovodrun), "--gloo", "-np", str(digits.RANKS), sys.executable, str(JOB), str(path)]
    environment = os.environ | VARIABLES
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text())["accuracy"]


@pytest.fixture
def check(reference: float) -> Callable[[dict[str, Any]], None]:
    """Sees whether a rank's result is that of the job: four ranks, Majority, late ranks, and the accuracy by `horovodrun`."""

    def check(result: dict[str, Any]) -> None:
        assert (result["ranks"], result["sync"]) == (digits.RANKS, "majority")
        assert 0 < result["late"][digits.SLOW_RANK] < result["rounds"]
        assert abs(result["accuracy"] - reference) < TOLERANCE

    return check
