"""A place for launchers with servers, which listen on every network and leave daemons behind: it has no network but its own
loopback, and all of its processes end with the program. Linux's namespaces make it, for any user.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

HERE = Path(__file__).parent
UNSHARE = ("unshare", "--map-root-user", "--net", "--uts", "--pid", "--mount-proc", "--fork", "--kill-child")
# The host's own name may lead to an address that is not there.
PREPARE = 'ip link set lo up && hostname localhost && exec "$@"'


class Ran(NamedTuple):
    """What came of the jobs of a program, by their names, and what was written to the screen."""

    results: dict[str, Any]
    screen: str


def ran(program: str, folder: Path, *, seconds: float, **variables: str) -> Ran:
    """Run a program of this folder to its end, which writes what came of its jobs; the arguments are those of `run`."""
    path = folder / "results.json"
    done = run(program, path, seconds=seconds, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return Ran(json.loads(path.read_text()), done.stdout + done.stderr)


def run(program: str, *arguments: str | Path, seconds: float, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program of this folder.

    Args:
        program: its name, without the ending.
        arguments: of the program.
        seconds: after which all is killed.
        variables: for its environment.
    """
    if subprocess.run([*UNSHARE, "sh", "-c", PREPARE, "sh", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("Linux's namespaces cannot be used here: " + " ".join(UNSHARE))
    command = [*UNSHARE, "sh", "-c", PREPARE, "sh", sys.executable, str(HERE / f"{program}.py"), *map(str, arguments)]
    with tempfile.TemporaryDirectory(prefix="sandbox", dir="/tmp") as folder:  # the names of Ray's sockets are long
        own = {"HOME": folder, "TMPDIR": folder, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            command, env=os.environ | own | variables, capture_output=True, text=True, timeout=seconds, check=False
        )
