"""Jobs whose ranks run a program of this folder, and files of what was found in them."""

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "parallel"))

from harness.hosts import Host
from harness.launch import Processes, build_double
from harness.matrix import TRANSPORTS, Setup
from harness.whole_jobs import PYTHON_PATH

__all__ = ["TRANSPORTS", "Host", "Processes", "Results", "Setup", "build_double", "start"]


def start(program: str, setup: Setup, folder: Path, **variables: str) -> Processes:
    """Start a program of this folder on all ranks, with the job's folder as its argument."""
    variables |= {
        "PYTHONPATH": f"{HERE}:{PYTHON_PATH}",
        "HOROVOD_PARTIAL_BUCKET_MB": "1e-6",  # a bucket for each parameter
    }
    return Processes(setup, [sys.executable, str(HERE / program), str(folder)], folder, **variables)


class Results:
    """What was found, an object for each run: printed, and kept in a file if there is a path for one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def read(self) -> list[dict[str, Any]]:
        """What earlier runs have found."""
        if self._path is None or not self._path.exists():
            return []
        return [json.loads(line) for line in self._path.read_text().splitlines()]

    def add(self, result: dict[str, Any]) -> None:
        line = json.dumps(result)
        print(line, flush=True)
        if self._path:
            with self._path.open("a") as file:
                file.write(line + "\n")
