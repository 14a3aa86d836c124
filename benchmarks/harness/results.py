"""What a job has measured so far: rank 0 leaves it in a file, from which the launcher takes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.files import replace


def leave(channel: Path, result: Any) -> None:
    """Replace, on rank 0, the result that is there."""
    replace(_file(channel), json.dumps(result))


class Results:
    """The launcher's side.

    Attributes:
        text: the newest result as JSON; empty before the first one.
    """

    def __init__(self, channel: Path) -> None:
        self._file = _file(channel)
        self.text = ""

    def hand_to(self, function: Callable[[Any], None]) -> None:
        """Call the function with the result, if it is a new one."""
        text = self._file.read_text() if self._file.exists() else ""
        if text != self.text:
            self.text = text
            function(json.loads(text))


def _file(channel: Path) -> Path:
    return channel / "result.json"
