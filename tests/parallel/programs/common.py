"""What the programs share: notes for the test that has started them."""

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.compiler import leave_out_the_compiler
from harness.rank import rank_of_environment, register

FOLDER = Path(os.environ["PARTIAL_TEST_FOLDER"])
RANK = rank_of_environment()

leave_out_the_compiler()
register(FOLDER, RANK)
_at_exit: list[Callable[[], None]] = []


@atexit.register  # before Horovod's handler, so it runs after that one
def run_at_exit() -> None:
    for function in _at_exit:
        function()


def at_the_end(function: Callable[[], None]) -> None:
    """Call a function when the process ends, after Horovod has shut down."""
    _at_exit.append(function)


def note(name: str, text: str = "") -> None:
    """Leave a note that the test reads."""
    file = FOLDER / f"note.{name}.{RANK}"
    new = file.with_name(file.name + ".new")
    new.write_text(text)
    new.rename(file)


def wait_for_note(name: str, rank: int) -> None:
    """Wait for another rank's note."""
    wait_until((FOLDER / f"note.{name}.{rank}").exists, f"rank {rank} notes {name}")


def wait_for_word(name: str) -> None:
    """Wait until the test says something."""
    wait_until((FOLDER / f"word.{name}").exists, f"the test says {name}")


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait until a condition that somebody else will make true is true."""
    end = time.monotonic() + 60
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"rank {RANK} waited in vain until {what}")
        time.sleep(0.005)


def is_over(what: str, number: int, shutdown: Callable[[], None]) -> bool:
    """After a step: lets that happen which the test has asked for, to rank 1. True if this rank trains no more."""
    if number == 10:
        note("running")
    if number < 20:
        return False
    if what in ("exit", "flushed", "shutdown") or (what in ("early", "uneven", "metric") and RANK == 1):
        return True
    if what in ("early", "uneven", "metric") and number == 60:  # the others have steps of their own
        return True
    if RANK == 1:
        if what == "raise":
            raise RuntimeError("planned failure")
        if what == "sys.exit":
            at_the_end(lambda: wait_for_note("internal-error", 0))
            sys.exit(7)
        if what == "stop":  # computes no more, and is killed by the test
            note("stopped")
            wait_for_word("never")
        if what == "caught":
            try:
                raise RuntimeError("planned failure")
            except RuntimeError:
                shutdown()
                raise
    return False


def end(what: str, shutdown: Callable[[], None], arrive: Callable[[], object], text: str = "") -> None:
    """After the training: what a rank does last, and its note; `arrive` arrives at some bucket."""
    if what == "shutdown":
        shutdown()
        try:
            arrive()
        except ValueError as error:
            note("after-shutdown", str(error))
        shutdown()
    if what == "early" and RANK != 1:
        wait_for_note("ended", 1)
    note("ended", text)
    if what == "early" and RANK == 1:
        sys.exit(0)  # a normal end too


def die_if_told(steps: int) -> None:
    """In an elastic job the rank on the host 127.0.0.1, as the job calls it, kills itself."""
    if steps == 12 and os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1":
        os.kill(os.getpid(), signal.SIGKILL)


def count_step(state: Any, has_final_size: bool) -> None:
    """A step of an elastic job is over."""
    state.steps += 1
    state.steps_at_final_size += has_final_size
    if state.steps == 10:
        note("running")
