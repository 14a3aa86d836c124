"""Python in a process of its own."""

import os
import subprocess
import sys
from typing import Any

Done = subprocess.CompletedProcess[str]


def run_command(*command: object, seconds: float = 60, **options: Any) -> Done:
    """Run a command to its end, whatever that is."""
    line = [str(word) for word in command]
    return subprocess.run(line, capture_output=True, text=True, timeout=seconds, check=False, **options)


def run_apart(program: str, *arguments: str, seconds: float = 60, **variables: str) -> Done:
    """Run a program, with more variables in its environment."""
    return run_command(sys.executable, "-c", program, *arguments, seconds=seconds, env=os.environ | variables)
