"""The digits, which `make demo` trains on, in each framework: a few steps under every policy, table and plots."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.timeout(240)  # four ranks import their framework, and train four times
@pytest.mark.parametrize(
    ("program", "backend"),
    [
        ("torch", ""),
        pytest.param("keras", "tensorflow", marks=pytest.mark.full_matrix),
        pytest.param("keras", "torch", marks=pytest.mark.full_matrix),
    ],
    ids=["torch", "keras", "keras-torch"],
)
def test_digits(program: str, backend: str, tmp_path: Path) -> None:
    options = ["--steps", "4", "--transport", "gloo", "--output", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / program / "digits.py"), *options],
        env=os.environ | {"KERAS_BACKEND": backend, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Majority" in done.stdout
    arms = {"full", "solo", "majority", "solo_latest"} | ({"work_sharing"} if program == "torch" else set())
    assert set(json.loads((tmp_path / "digits.json").read_text())) == {*arms, "about"}  # the last says how it was made
    assert {"accuracy.png", "arrivals.png"} <= {file.name for file in tmp_path.iterdir()}
