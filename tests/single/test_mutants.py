"""What each defect of the lists of mutants replaces stands in the sources, so that `make mutants` can plant it."""

import sys
from pathlib import Path

import pytest
from interpreter import run_command

TOOL = Path(__file__).resolve().parents[2] / "tools" / "mutants.py"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 cannot read TOML")
def test_every_mutant_can_be_planted() -> None:
    done = run_command(sys.executable, TOOL, "build/mutants", "build/info", "--list")
    assert done.returncode == 0, done.stderr
