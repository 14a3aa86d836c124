"""Ratios of times that were measured in pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats


def with_interval(values: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """The geometric mean of the ratios of values to others, pair by pair, and its 95 % interval by Student's t."""
    logs = np.log(values) - np.log(others)
    half = stats.t.ppf(0.975, len(logs) - 1) * stats.sem(logs)
    return dict(zip(("ratio", "low", "high"), np.exp(logs.mean() + np.array([0, -half, half])).tolist(), strict=True))


def shown(ratio: Mapping[str, float]) -> list[str]:
    """A ratio and its interval, for a table."""
    return [f"{ratio['ratio']:.3f}", f"{ratio['low']:.3f} to {ratio['high']:.3f}"]
