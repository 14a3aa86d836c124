"""What tools/gpu_check.py runs on a GPU beside the tests, here on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.matrix import alone
from harness.whole_jobs import Job

ROOT = Path(__file__).resolve().parents[2]


@alone
def test_every_policy(job: Job) -> None:
    assert job.run("every_policy", "--steps", "2") == 0, job.output()
    assert "every training is that of one process" in job.output()


def measured_by(program: str, figures: Path, *load: str) -> dict[str, Any]:
    """What a benchmark measures in one block of each arm."""
    options = ["--device", "cpu", "--smoke", "--ranks", "2", "--transport", "gloo", "--blocks", "1", "--block", "1"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / program), *load, *options, "--json", figures],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(figures.read_text())


@pytest.mark.parametrize("model", ["resnet50", pytest.param("transformer", marks=pytest.mark.full_matrix)])
def test_training(model: str, tmp_path: Path) -> None:
    measured = measured_by("gpu_training.py", tmp_path / "figures.json", "--model", model)
    for setting in ("even", "slowed"):
        assert set(measured[setting]["over_horovod"]) == {"horovod", "horovod_again", "full", "majority", "solo"}
        assert min(measured[setting]["per_second"].values()) > 0


@pytest.mark.full_matrix
@pytest.mark.parametrize("load", ["resnet50", "small", "transformer"])
def test_the_profile(load: str, tmp_path: Path) -> None:
    """Every part is found in its step: on the host, and on the device where the rank queues work."""
    parts = measured_by("gpu_profile.py", tmp_path / "figures.json", "--load", load)["parts"]
    assert set(parts) == {"horovod", "full", "quorum of all", "majority", "work sharing"}
    for arm in (
        "horovod",
        "full",
        "quorum of all",
    ):  # a step of the others may have no round, or one that was begun before
        taken = {"take"} if arm == "quorum of all" else set()
        found = {part: row for part, row in parts[arm].items() if row["calls"]}
        of_reductions = ["negotiate", "queue", "reduce", "finish"]
        on_device = {"step", "forward", "backward", "hook", "optimizer", *taken}
        assert set(found) == {"submit", "wait", *of_reductions, *on_device}
        assert {part for part, row in found.items() if "device_last_ms" in row} == on_device
        assert found["forward"]["calls"] == found["backward"]["calls"] == found["optimizer"]["calls"] == 1
        assert found["hook"]["calls"] == parts["horovod"]["submit"]["calls"]  # one for each gradient
        ends = [found[part]["host_last_ms"] for part in (*of_reductions, "wait", "optimizer", "step")]
        assert ends == sorted(ends)
    for arm in ("majority", "work sharing"):
        assert min(parts[arm][part]["calls"] for part in ("step", "hook", "submit", "wait", "take", "optimizer")) > 0
