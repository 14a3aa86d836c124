"""What the programs share: notes for the test that has started them."""

from __future__ import annotations

import os
import time
from pathlib import Path

from harness.rank import rank_of_environment, register

FOLDER = Path(os.environ["PARTIAL_TEST_FOLDER"])
RANK = rank_of_environment()

register(FOLDER, RANK)


def note(name: str, text: str = "") -> None:
    """Leave a note that the test reads."""
    file = FOLDER / f"note.{name}.{RANK}"
    new = file.with_name(file.name + ".new")
    new.write_text(text)
    new.rename(file)


def wait_for_note(name: str, rank: int) -> None:
    """Wait for another rank's note."""
    _wait(FOLDER / f"note.{name}.{rank}")


def wait_for_word(name: str) -> None:
    """Wait until the test says something."""
    _wait(FOLDER / f"word.{name}")


def _wait(file: Path) -> None:
    end = time.monotonic() + 60
    while not file.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"rank {RANK} waited in vain for {file.name}")
        time.sleep(0.005)
