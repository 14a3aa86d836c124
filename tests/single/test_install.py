"""What is missing for an installation is told in one line. `make matrix` installs everything, on bare systems."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def run(*command: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in an interpreter that sees no installed package."""
    line = [sys.executable, "-S", *map(str, command)]
    return subprocess.run(line, env=variables, capture_output=True, text=True, timeout=60, check=False)


def test_no_framework() -> None:
    done = run(TOOLS / "install_horovod.py")
    assert done.returncode == 1
    assert "has neither PyTorch nor TensorFlow; install one of them" in done.stderr
    assert done.stderr.count("\n") == 1


def test_no_horovod() -> None:
    done = run(TOOLS / "horovod_info.py")
    assert done.returncode == 1
    assert "There is no Horovod in" in done.stderr
    assert "install_horovod.py" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.fixture
def packages(tmp_path: Path) -> str:
    """A folder of packages where PyTorch seems to be installed."""
    metadata = tmp_path / "torch-9.9.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    return str(tmp_path)


def test_no_compiler(packages: str) -> None:
    done = run(TOOLS / "install_horovod.py", "--gloo", PYTHONPATH=packages, PATH="/nowhere")
    assert done.returncode == 1
    assert "Building Horovod needs a C++ compiler (g++, or what CXX names) and make" in done.stderr
    assert done.stderr.count("\n") == 1


def test_mpi_is_asked_for_and_missing(packages: str) -> None:
    done = run(TOOLS / "install_horovod.py", "--mpi", PYTHONPATH=packages, PATH="/nowhere")
    assert done.returncode == 1
    assert "--mpi needs mpicxx and mpirun" in done.stderr
