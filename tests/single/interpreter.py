"""Python in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys


def run_apart(program: str, *arguments: str, seconds: float = 60, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program, with more variables in its environment."""
    command = [sys.executable, "-c", program, *arguments]
    environment = os.environ | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
