"""Figures of several seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

import numpy as np


def deviation(values: Sequence[float]) -> float:
    """The standard deviation; 0 of a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def standard_error(values: Sequence[float]) -> float:
    """Of a mean; 0 of a single value."""
    return deviation(values) / math.sqrt(max(1, len(values)))


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
