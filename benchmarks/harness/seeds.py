"""Figures of several seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

import numpy as np


def deviation(values: Sequence[float]) -> float:
    """The standard deviation; 0 of a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def standard_error(values: Sequence[float]) -> float:
    """Of a mean; 0 of a single value."""
    return deviation(values) / math.sqrt(max(1, len(values)))


def ahead_in_time(
    arm: Sequence[tuple[float, float]],
    lengths: Sequence[Sequence[tuple[float, float]]],
    difference: Callable[[float, float], float],
) -> tuple[float | None, float]:
    """How much better an arm is than trainings of several lengths in the time that it takes.

    Args:
        arm: seconds and quality of each seed.
        lengths: by seed, those of the trainings that it is compared with.
        difference: of a quality from another one.

    Returns:
        The mean over the seeds, None where `in_time` is for one of them, and its standard error.
    """
    beside = [in_time(trainings, seconds) for trainings, (seconds, _) in zip(lengths, arm, strict=True)]
    ahead = [difference(mine, other) for (_, mine), other in zip(arm, beside, strict=True) if other is not None]
    return statistics.fmean(ahead) if len(ahead) == len(arm) else None, standard_error(ahead)


def in_time(trainings: Iterable[tuple[float, float]], seconds: float) -> float | None:
    """The quality after a training of so many seconds, on a straight line between two lengths of training.

    Args:
        trainings: seconds and quality of each, at least one.
        seconds: of the training that is asked for.

    Returns:
        None where all trainings took longer, or all took less.
    """
    points = sorted(trainings)
    if not points[0][0] <= seconds <= points[-1][0]:
        return None
    return float(np.interp(seconds, *zip(*points, strict=True)))
