"""The log: one for Python and for the hooks, at the level of the settings."""

import pytest
from interpreter import run_apart

PROGRAM = """
import horovod_partial.torch
from horovod_partial import _attach, log

log.logger.warning("of Python")
_attach.log(30, 0, "of a hook")
"""


@pytest.mark.parametrize(("level", "shown"), [("error", False), ("debug", True)])
def test_the_level_holds_for_python_and_for_the_hooks(level: str, shown: bool) -> None:
    """From the import on, whoever initialises Horovod. Hooks call `Log`, of which Python's side is `_attach.log`."""
    done = run_apart(PROGRAM, seconds=110, HOROVOD_PARTIAL_LOG_LEVEL=level)
    assert done.returncode == 0, done.stderr
    assert ("WARNING: of Python" in done.stderr) == shown, done.stderr
    assert ("WARNING: of a hook" in done.stderr) == shown, done.stderr
