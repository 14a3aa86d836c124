"""How far a job is: rank 0 writes it into a file, from which the launcher draws bars."""

from __future__ import annotations

import json
import time
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from harness.files import replace

CHANNEL = "HARNESS_CHANNEL"  # the variable that tells ranks the folder they share with their launcher

_INTERVAL = 0.1  # seconds between two reports, so that they cost nothing
_last = 0.0
_reports: Path | None = None  # where this process reports, if it does


def report_to(channel: Path) -> None:
    """Let this process, rank 0, be the one that reports."""
    global _reports
    _reports = _file(channel)


def progress(stage: str, step: int, steps: int) -> None:
    """Report, on any rank, that the job is at `step` of the `steps` of a stage."""
    global _last
    now = time.monotonic()
    if _reports is not None and (now - _last > _INTERVAL or step == 0):
        _last = now
        replace(_reports, json.dumps([stage, step, steps]))


class ProgressBars:
    """The launcher's side: one bar for each stage, in the context of `bars`."""

    def __init__(self, channel: Path) -> None:
        self._file = _file(channel)
        self.bars = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._stages: dict[str, TaskID] = {}

    def update(self) -> None:
        """Show what rank 0 has reported last."""
        if not self._file.exists():
            return
        stage, step, steps = json.loads(self._file.read_text())
        if stage not in self._stages:
            self.finish()
            self._stages[stage] = self.bars.add_task(stage, total=steps)
        self.bars.update(self._stages[stage], completed=step)

    def finish(self) -> None:
        """Everything that has been begun is done."""
        for task in self.bars.tasks:
            self.bars.update(task.id, completed=task.total)


def _file(channel: Path) -> Path:
    return channel / "progress.json"
