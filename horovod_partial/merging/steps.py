"""The times of a training's steps, from which a plan of merged gradients is made."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class StepTimes:
    """The times of successive steps on one rank: when each gradient was computed, and when the last result arrived.

    Each step has a row of times, in seconds on one clock: the time of each gradient, then the time of the last result.
    The time is NaN for a gradient that the step did not compute. A step begins when the previous step has ended, so the
    first step is not measured.
    """

    def __init__(self, gradients: int, rows: Sequence[Sequence[float]]) -> None:
        times = np.array(rows).reshape(-1, gradients + 1)
        moments, ends = times[1:, :-1], times[:, -1]
        first = np.fmin.reduce(moments, axis=1, initial=math.nan)
        self._steps = np.diff(ends)
        self._around = first - ends[:-1]
        self._behind = moments - first[:, None]  # how many seconds after the step's first gradient each was computed

    @property
    def steps(self) -> int:
        """How many steps have been measured."""
        return len(self._steps)

    def step_seconds(self) -> float:
        """Return the median time of the measured steps."""
        return _median(self._steps)

    def around_seconds(self) -> float:
        """Return the median time from the last result of a step to the first gradient of the next step."""
        return float(np.nan_to_num(_median(self._around)))

    def ready(self) -> list[float]:
        """Return the median time at which each gradient is computed, in seconds after a step's first gradient.

        A gradient that was never computed gets the latest of these times.
        """
        medians = np.array([_median(behind) for behind in self._behind.T])
        latest = np.fmax.reduce(medians, initial=0.0)
        return np.nan_to_num(medians, nan=latest).tolist()


def _median(times: NDArray[np.float64]) -> float:
    """Return the median of the times that are known; NaN if there are none."""
    known = times[~np.isnan(times)]
    return float(np.median(known)) if len(known) else math.nan


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
