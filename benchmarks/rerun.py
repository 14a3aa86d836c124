"""Measure figures of docs/benchmarks.md again: each by the command that is stored with it.

    .venv/bin/python benchmarks/rerun.py [overhead straggler ...]

Names are those of files in benchmarks/results, which are replaced; without names all of them, which takes hours. A benchmark that fails
leaves its file. Nothing else should run on the machine: a file says whether something did before (`busy`).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

TOP = Path(__file__).resolve().parents[1]
RESULTS = TOP / "benchmarks" / "results"


def rerun(name: str) -> int:
    """Returns the exit status."""
    file = RESULTS / f"{name}.json"
    about = json.loads(file.read_text())["about"]
    print(f"{name}: {about['command']}", flush=True)
    command = [sys.executable, *shlex.split(about["command"]), "--json", str(file)]
    return subprocess.run(command, cwd=TOP, env={**os.environ, **about["environment"]}, check=False).returncode


def main() -> None:
    stored = sorted(file.stem for file in RESULTS.glob("*.json"))
    parser = argparse.ArgumentParser(
        description="Run benchmarks again with the commands that are stored with their figures."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(stored)}; all by default")
    names = parser.parse_args().names or stored
    if unknown := set(names).difference(stored):
        parser.error(f"there are no figures of {', '.join(sorted(unknown))}")
    failed = [name for name in names if rerun(name)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
