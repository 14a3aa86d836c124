"""Finds out which rank is slow, how much, and in what way.

A rank's *score* is the fastest rank's mean compute time divided by its own. It uses the mean, because a rank that is
slow in one step of five has the same median as the others.

The *kind* follows from the times of each rank's steps. First, what all ranks have in common in a step (longer
sequences, the end of an epoch) is removed. Then the logarithms of the times are split in two, so that the sum of the
squares within both parts is smallest (Otsu, IEEE Transactions on Systems, Man, and Cybernetics 9, 1979). If the parts
are clearly apart, the upper one holds the rank's slow steps, and the lower one gives the rank's usual time. Otherwise
all steps give the usual time.

* *persistent*: the rank's usual time and its mean are longer than those of other ranks.
* *bursts*: slow steps come together, in fewer runs than by chance (the runs test of Wald and Wolfowitz, 1940).
* *random*: slow steps come at random.

If a rank is slow in two ways, the kind is the one that costs more. A burst begins and ends where the steps pass from
one part to the other, after single steps have been smoothed away. Both levels are known by then. A search for change
points between unknown levels, such as PELT, would need a penalty, and would not find single slow steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Kind = Literal["none", "persistent", "bursts", "random"]

LEAST_STEPS = 30  # with fewer steps than this, it is not determined in what way a rank is slow
LEAST_SLOWNESS = 1.05  # a persistently slow rank takes at least this many times as long as the faster ranks
_LEAST_STEP = 1.2  # a slow step takes at least this many times the usual step time of its rank
_LEAST_SLOW, _LEAST_SHARE = 4, 0.02  # slow steps count if they are at least this many, and at least this share
_LEAST_USUAL = 0.1  # if less than this share of a slow rank's steps is fast, the rank counts as persistently slow
# The means of a rank's slow steps and of its usual steps lie at least this many standard deviations apart.
# Halves of a normal distribution lie 2.7 apart, and those of a uniform one 3.5; by chance a little more with few steps.
_LEAST_APART = 3.8
_SURE = 4.0  # two values count as different if they lie at least this many standard errors apart
_SMOOTHED = 5  # before bursts of slow steps are found, a window of this many steps smooths single slow steps away
_LEAST_IMBALANCE = 1.1  # ranks wait for each other if a step's slowest rank takes this many times the ranks' mean
_FEW = 4  # with fewer ranks than this, it is uncertain whether long steps have a cause that all ranks share
# In a job with few ranks, long steps have a cause that all ranks share if `_together` returns at least this.
_TOGETHER = 0.5
_ALIKE = 1.5  # standard deviations of ranks' times are alike if they differ by at most this factor


@dataclass(frozen=True)
class Slowness:
    """How slow a rank is, and in what way.

    Attributes:
        rank: the rank.
        compute: the mean compute time of a step, in seconds.
        score: the fastest rank's `compute` divided by this rank's; 1 for the fastest.
        kind: in what way the rank is slow; `"none"` if it is not, or if there are too few steps to tell.
        factor: how many times as long as usual the rank's slow steps take; 1 if it is not slow.
        share: the share of the rank's steps that are slow, 0 to 1.
        burst: the median length of a burst, in steps; 0 unless the kind is bursts.
        period: the median number of steps from the begin of one burst to that of the next; 0 unless there are two
            bursts or more.
    """

    rank: int
    compute: float
    score: float
    kind: Kind = "none"
    factor: float = 1.0
    share: float = 0.0
    burst: float = 0.0
    period: float = 0.0

    def __str__(self) -> str:
        """Say how slow the rank is: the rest of a sentence that begins with the rank's name."""
        digits = 2 if self.factor < 1.2 else 1 if self.factor < 10 else 0
        times = f"{self.factor:.{digits}f} times"
        if self.kind == "persistent":
            return f"always takes {times} as long as the faster ranks"
        if self.kind == "random":
            return f"takes {times} as long in {self.share:.0%} of its steps, at random"
        if self.kind == "bursts":
            every = f" every {self.period:.0f}" if self.period else ""
            return f"takes {times} as long in bursts of {self.burst:.0f} steps{every}"
        return "is not slow"


@dataclass(frozen=True)
class _Split:
    """The steps of one rank, split into slow and usual steps. All levels are logarithms of seconds.

    Attributes:
        usual: the level of the usual steps.
        error: the standard error of `usual`.
        slow: whether each step is slow, of the shape (steps,).
        higher: how far the level of slow steps is above `usual`; 0 if no step is slow.
    """

    usual: float
    error: float
    slow: Flags
    higher: float


def of_job(ranks: list[int], compute: Floats) -> list[Slowness]:
    """Find out how slow each rank of a job is, and in what way.

    Args:
        ranks: the ranks.
        compute: compute times in seconds, of the shape (steps, ranks), with the same steps of all ranks.
    """
    compute = np.maximum(compute, 1e-6)  # a recorded time may be 0 microseconds, which has no logarithm
    means = compute.mean(axis=0)
    scores = means.min() / means
    plain = [Slowness(rank, float(mean), float(score)) for rank, mean, score in zip(ranks, means, scores, strict=True)]
    if len(compute) < LEAST_STEPS:
        return plain
    times = np.log(compute)
    splits = [_split(column) for column in _own(times).T]
    # Compare each rank with a fast one, but not the fastest: a rank faster than all others does not make them slow.
    normal = sorted(splits, key=lambda split: split.usual)[(len(splits) - 1) // 4]
    return [_of_rank(one, split, normal) for one, split in zip(plain, splits, strict=True)]


def follows_data(compute: Floats, slow: list[Slowness]) -> bool:
    """Return whether ranks wait for each other because samples differ, and not because machines differ.

    If each rank draws its samples at random, the times of all ranks have one distribution, and one step does not
    predict the next. A slow machine has a longer mean, a busy machine is busy for several steps in a row, and hiccups
    stand out from the usual time. But if times vary from step to step on all ranks alike for another reason, this
    function takes that for an effect of the samples.

    Args:
        compute: compute times in seconds, of the shape (steps, ranks), with the same steps of all ranks.
        slow: how slow each rank is, from `of_job`.
    """
    steps = len(compute)
    if steps < LEAST_STEPS or any(rank.kind != "none" for rank in slow):
        return False
    if compute.max(axis=1).mean() < _LEAST_IMBALANCE * compute.mean():
        return False
    times = _own(np.log(np.maximum(compute, 1e-6)))
    deviations = times.std(axis=0)
    means = np.abs(times.mean(axis=0) - times.mean())
    apart = means > np.maximum(np.log(LEAST_SLOWNESS), _SURE * deviations / np.sqrt(steps))
    if apart.any() or deviations.max() > _ALIKE * deviations.min():
        return False
    above = (times - times.mean(axis=0)) / deviations
    autocorrelation = (above[1:] * above[:-1]).mean(axis=0)
    return bool(np.abs(autocorrelation).max() < _SURE / np.sqrt(steps))


def _own(times: Floats) -> Floats:
    """Remove what all ranks have in common in a step from the logarithms of their times. Shapes are (steps, ranks)."""
    if times.shape[1] == 1:
        return times
    above = times - np.median(times, axis=0)
    if times.shape[1] < _FEW and _together(above) < _TOGETHER:
        return times  # few ranks that are not slow together: the lower quartile of their times is just the shortest
    # Slow ranks do not change the lower quartile of the ranks' times. So it is what all ranks share in a step.
    shared = np.quantile(above, 0.25, axis=1, method="lower")
    shared = shared - np.median(shared)
    own = times - shared[:, None]
    if _spread(own) < 0.8 * _spread(times):
        return own
    # If all steps are alike, the quartile of the ranks' times is noise, and to subtract it would add noise.
    # So subtract the quartile only from steps that are long for all ranks.
    noise = 1.4826 * np.median(np.abs(shared))
    long = shared > max(np.log(_LEAST_STEP), 5 * noise)
    return np.where(long[:, None], own, times)


def _together(above: Floats) -> float:
    """Return how often ranks are slow together, -1 to 1.

    The result is the share of steps in which two ranks are on the same side of their medians, minus the share of the
    other steps; the mean over all pairs of ranks. `above` are distances from the medians, of the shape (steps, ranks).
    """
    ranks = above.shape[1]
    return float((np.sign(above).sum(axis=1) ** 2 - ranks).mean() / (ranks * (ranks - 1)))


def _spread(times: Floats) -> float:
    """Return the median distance of times from their rank's median. `times` has the shape (steps, ranks)."""
    return float(np.median(np.abs(times - np.median(times, axis=0))))


def _split(times: Floats) -> _Split:
    """Split one rank's steps into slow and usual ones, if there are slow ones. `times` are logarithms of seconds."""
    steps = len(times)
    least, usual = max(_LEAST_SLOW, round(_LEAST_SHARE * steps)), max(_LEAST_SLOW, round(_LEAST_USUAL * steps))
    # Limit extreme times. Otherwise one very long step, such as a checkpoint, would decide which steps count as slow.
    low, high = np.partition(times, (least - 1, steps - least))[[least - 1, steps - least]]
    values = np.sort(np.clip(times, low, high))
    sizes = np.arange(usual, steps - least + 1)  # the numbers of usual steps with which a split is tried
    sums = np.cumsum(values)
    below, above = sums[sizes - 1] / sizes, (sums[-1] - sums[sizes - 1]) / (steps - sizes)
    best = int(np.argmax(sizes * (steps - sizes) * (above - below) ** 2))
    size, apart = int(sizes[best]), float(above[best] - below[best])
    within = np.sqrt((values[:size].var() * size + values[size:].var() * (steps - size)) / steps)
    if apart < max(np.log(_LEAST_STEP), _LEAST_APART * (1 + 8 / steps) * float(within)):
        return _Split(float(np.median(times)), _error(times), np.zeros(steps, dtype=bool), 0.0)
    slow = times > (values[size - 1] + values[size]) / 2
    return _Split(float(np.median(times[~slow])), _error(times[~slow]), slow, apart)


def _error(times: Floats) -> float:
    """Return the standard error of the median of times, estimated from the median distance to it."""
    return float(1.2533 * 1.4826 * np.median(np.abs(times - np.median(times))) / np.sqrt(len(times)))


def _of_rank(plain: Slowness, split: _Split, normal: _Split) -> Slowness:
    ahead = split.usual - normal.usual
    share = float(split.slow.mean())
    error = float(np.hypot(split.error, normal.error))
    # If short and long steps alternate, a rank's usual time is uncertain. So a slow rank must have a long mean, too.
    persistent = ahead > max(np.log(LEAST_SLOWNESS), _SURE * error) and plain.score < 1 / LEAST_SLOWNESS
    if persistent and np.expm1(ahead) > share * np.expm1(split.higher):
        return replace(plain, kind="persistent", factor=float(np.exp(ahead)), share=1.0)
    if not split.slow.any():
        return plain
    factor = float(np.exp(split.higher))
    if not _in_runs(split.slow):
        return replace(plain, kind="random", factor=factor, share=share)
    burst, period = _bursts(split.slow)
    return replace(plain, kind="bursts", factor=factor, share=share, burst=burst, period=period)


def _in_runs(slow: Flags) -> bool:
    """Return whether slow steps come together, in fewer runs than by chance (the runs test of Wald and Wolfowitz)."""
    few, many = int(slow.sum()), int((~slow).sum())
    both = few * many
    runs = 1 + int((slow[1:] != slow[:-1]).sum())
    expected = 1 + 2 * both / (few + many)
    variance = 2 * both * (2 * both - few - many) / ((few + many) ** 2 * (few + many - 1))
    return bool(variance > 0 and (runs - expected) / np.sqrt(variance) < -_SURE)


def _bursts(slow: Flags) -> tuple[float, float]:
    """Return the median length of a burst, and the median distance from one burst to the next, both in steps."""
    half = _SMOOTHED // 2
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(slow, half, mode="edge"), _SMOOTHED)
    smooth = np.pad(windows.sum(axis=1) > half, 1).astype(np.int8)
    changes = np.diff(smooth)
    begins, ends = np.flatnonzero(changes > 0), np.flatnonzero(changes < 0)
    if not len(begins):
        return 1.0, 0.0
    period = float(np.median(np.diff(begins))) if len(begins) > 1 else 0.0
    return float(np.median(ends - begins)), period
