"""What tools/gpu_check.py runs on a GPU beside the tests, here on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness.matrix import alone
from harness.whole_jobs import Job

ROOT = Path(__file__).resolve().parents[2]


@alone
def test_every_policy(job: Job) -> None:
    assert job.run("every_policy", "--steps", "2") == 0, job.output()
    assert "every training is that of one process" in job.output()


@pytest.mark.parametrize("model", ["resnet50", pytest.param("transformer", marks=pytest.mark.full_matrix)])
def test_training(model: str, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    options = ["--device", "cpu", "--smoke", "--ranks", "2", "--transport", "gloo", "--blocks", "1", "--block", "1"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu_training.py"), "--model", model, *options, "--json", figures],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    measured = json.loads(figures.read_text())
    for setting in ("even", "slowed"):
        assert set(measured[setting]["over_horovod"]) == {"horovod", "horovod_again", "full", "majority", "solo"}
        assert min(measured[setting]["per_second"].values()) > 0
