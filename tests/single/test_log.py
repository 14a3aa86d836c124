"""The log: one for Python and for the hooks, at the level of the settings."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch
import horovod.torch
import horovod_partial.torch as hvd
from horovod_partial import log

log.logger.warning("of Python")
getattr(sys.modules[sys.argv[1]], "init")()
hvd.partial_allreduce(torch.ones(1), name="bucket", sync="solo")
"""


@pytest.mark.parametrize(
    ("level", "init", "shown"),
    [
        ("error", "horovod_partial.torch", False),
        ("error", "horovod.torch", False),
        ("debug", "horovod.torch", True),
    ],
)
def test_the_level_holds_for_python_and_for_the_hooks(level: str, init: str, shown: bool) -> None:
    """A decision log that cannot be written makes a hook warn, whoever has initialised Horovod."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, init],
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
        env={
            **os.environ,
            "HOROVOD_PARTIAL_LOG_LEVEL": level,
            "HOROVOD_PARTIAL_DECISION_LOG": "/nowhere/decisions",
        },
    )
    assert ("WARNING: of Python" in done.stderr) == shown, done.stderr
    assert ("WARNING: cannot write the decision log /nowhere/decisions" in done.stderr) == shown, done.stderr
