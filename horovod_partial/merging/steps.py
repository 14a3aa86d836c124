"""The times of a training's steps, from which a plan of merged gradients is made."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Sequence


class StepTimes:
    """The times of successive steps on one rank: when each gradient was computed, and when the last result arrived.

    Each step has a row of times, in seconds on one clock: the time of each gradient, then the time of the last result.
    The time is NaN for a gradient that the step did not compute. A step begins when the previous step has ended, so the
    first step is not measured.
    """

    def __init__(self, gradients: int, rows: Sequence[Sequence[float]]) -> None:
        self._steps: list[float] = []
        self._around: list[float] = []
        # For each gradient and each step: how many seconds after the step's first gradient it was computed.
        self._behind: list[list[float]] = [[] for _ in range(gradients)]
        for (*_, begin), (*moments, end) in itertools.pairwise(rows):
            self._steps.append(end - begin)
            first = min((at for at in moments if not math.isnan(at)), default=math.nan)
            if math.isnan(first):
                continue
            self._around.append(first - begin)
            for behind, at in zip(self._behind, moments, strict=True):
                if not math.isnan(at):
                    behind.append(at - first)

    @property
    def steps(self) -> int:
        """How many steps have been measured."""
        return len(self._steps)

    def step_seconds(self) -> float:
        """Return the median time of the measured steps."""
        return statistics.median(self._steps)

    def around_seconds(self) -> float:
        """Return the median time from the last result of a step to the first gradient of the next step."""
        return statistics.median(self._around) if self._around else 0.0

    def ready(self) -> list[float]:
        """Return the median time at which each gradient is computed, in seconds after a step's first gradient.

        A gradient that was never computed gets the latest of these times.
        """
        medians = [statistics.median(behind) if behind else None for behind in self._behind]
        latest = max((median for median in medians if median is not None), default=0.0)
        return [latest if median is None else median for median in medians]


class Steps:
    """Counts the steps of a training, and keeps the times of the first and the last steps under the present plan.

    Threads of autograd call `record`, each for other gradients. One thread calls the other methods, between backward
    passes. The first plan comes after `due` steps; never if `due` is None. `window` is the number of steps to measure.
    """

    def __init__(self, gradients: int, due: int | None, window: int) -> None:
        self._gradients = gradients
        self._rows = window + 1  # rows of times to keep. The first row only says when the first measured step begins
        self._steps = 0
        self.begin_plan(due)

    def begin_plan(self, steps: int | None) -> None:
        """Forget all times, because a new plan begins. The next plan comes after `steps` steps; never for None."""
        self._due = None if steps is None else self._steps + steps
        self._current = [math.nan] * self._gradients
        self._first: list[list[float]] = []
        self._last: deque[list[float]] = deque(maxlen=self._rows)

    @property
    def is_measured(self) -> bool:
        """Whether the next plan may need the times of this step."""
        return self._due is not None and 0 < self._due - self._steps <= self._rows

    def record(self, gradient: int) -> None:
        """Record the present time as the time of the gradient with the number `gradient`."""
        self._current[gradient] = time.perf_counter()

    def end_step(self) -> bool:
        """Record that all results of a step have arrived. Returns whether the next plan is due."""
        row = [*self._current, time.perf_counter()]
        self._current = [math.nan] * self._gradients
        if len(self._first) < self._rows:
            self._first.append(row)
        self._last.append(row)
        self._steps += 1
        return self._steps == self._due

    def first(self) -> StepTimes:
        """Return the times of the first steps under the present plan."""
        return StepTimes(self._gradients, self._first)

    def last(self) -> StepTimes:
        """Return the times of the last steps under the present plan."""
        return StepTimes(self._gradients, list(self._last))
