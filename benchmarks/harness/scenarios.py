"""Ten ways in which ranks are slow, and two production jobs: how long each rank computes in each step, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from horovod_partial.insight.simulate import RecordedSteps

TRACES = Path(__file__).parents[1] / "traces"

Floats = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int, int], Floats]


def _one_random(generator: np.random.Generator, steps: int, ranks: int) -> Floats:
    return np.where(generator.random((steps, ranks)).argsort(axis=1) == 0, 3.0, 1.0)


def _one_always(generator: np.random.Generator, steps: int, ranks: int) -> Floats:
    return np.where(np.arange(ranks) == ranks - 1, 2.5, np.ones((steps, 1)))


def _half_slower(generator: np.random.Generator, steps: int, ranks: int) -> Floats:
    return np.where(np.arange(ranks) < ranks // 2, np.ones((steps, 1)), 1.7)


def _log_normal(generator: np.random.Generator, steps: int, ranks: int) -> Floats:
    return 1.0 + 0.3 * generator.lognormal(0.0, 1.0, (steps, ranks))


def _rotating(generator: np.random.Generator, steps: int, ranks: int) -> Floats:
    return 1.0 + 0.25 * (np.add.outer(np.arange(steps), np.arange(ranks)) % ranks)


def _bursts(generator: np.random.Generator, steps: int, ranks: int) -> Floats:
    slow = (np.arange(steps) // 20) % 2 == 1
    return np.where(slow[:, None] & (np.arange(ranks) < 2), 3.0, 1.0)


def _two_groups(generator: np.random.Generator, steps: int, ranks: int) -> Floats:
    quick_half = (np.arange(steps)[:, None] // 10) % 2 == np.arange(ranks) % 2
    return np.where(quick_half, 1.0, 2.0)


def _growing(generator: np.random.Generator, steps: int, ranks: int) -> Floats:
    growth = np.linspace(1.0, 3.0, steps)[:, None]
    return np.where(np.arange(ranks) == 0, growth, 1.0)


def _one_in_twenty(generator: np.random.Generator, steps: int, ranks: int) -> Floats:
    return np.where(generator.random((steps, ranks)) < 0.05, 11.0, 1.0)


def _recorded(name: str) -> Draw:
    def draw_steps(generator: np.random.Generator, steps: int, ranks: int) -> Floats:
        return 1.0 + RecordedSteps.load(TRACES / f"{name}.csv").draw(steps, ranks, 1.0, seed=0)

    return draw_steps


SCENARIOS: dict[str, Draw] = {
    "none": lambda generator, steps, ranks: np.ones((steps, ranks)),
    "one random": _one_random,
    "one always": _one_always,
    "half 1.7 times slower": _half_slower,
    "log-normal": _log_normal,
    "rotating": _rotating,
    "bursts": _bursts,
    "two groups": _two_groups,
    "growing": _growing,
    "one in twenty": _one_in_twenty,
}


RECORDED = {name: _recorded(name) for name in ("sequences", "one_worker_slowed")}


def draw(name: str, *, steps: int, ranks: int, base: float, seed: int) -> Floats:
    """Return the seconds of each step, of the shape (steps, ranks). `base`: the seconds of a step that is not slow."""
    return base * (SCENARIOS | RECORDED)[name](np.random.default_rng(seed), steps, ranks)
