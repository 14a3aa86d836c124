"""Which rank is slow, how much, and in what way.

A rank's *score* is the fastest rank's mean compute time over its own. It is the mean and not the median, because a rank that
is slow in one step of five has the median of the others.

The *kind* follows from each rank's steps, of which what all ranks have in common in a step (longer sequences, an epoch's
end) is taken out first. The logarithms of their times are split in two where the squares within both parts are least (Otsu,
IEEE Transactions on Systems, Man, and Cybernetics 9, 1979). If the parts are clearly apart, the upper one holds the rank's slow
steps. The lower one, or all, is the rank's usual time.

* *persistent*: the usual time is longer than other ranks', and so is the mean.
* *bursts*: slow steps come together, in fewer runs than by chance (the runs test of Wald and Wolfowitz, 1940).
* *random*: slow steps come as by chance.

A rank that is slow in two ways is named by the one that costs more. There are two levels and they are known by then, so the
change points of bursts are where the steps pass from one to the other, once single steps are smoothed away. A search for
change points of unknown levels (PELT, say) would need a penalty to be chosen, and finds no steps that are slow one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Kind = Literal["none", "persistent", "bursts", "random"]

LEAST_STEPS = 30  # fewer tell nothing of a kind
LEAST_SLOWNESS = 1.05  # of the usual time, to be called persistent
_LEAST_STEP = 1.2  # of a slow step over the usual time
_LEAST_SLOW, _LEAST_SHARE = 4, 0.02  # slow steps; among all
_LEAST_USUAL = 0.1  # a rank that is slow in more of its steps than the rest is slow persistently
# A normal distribution that is split in two has its parts 2.7 of their standard deviations apart, an even one 3.5, and
# those of few steps a little more by chance.
_LEAST_APART = 3.8
_SURE = 4.0  # standard errors
_SMOOTHED = 5  # steps
_LEAST_IMBALANCE = 1.1  # the slowest rank of a step over the mean
_FEW = 4  # ranks
_TOGETHER = 0.5  # of the steps of two ranks, those on the same side of both medians, less the others
_ALIKE = 1.5  # the largest over the smallest deviation of the ranks' times


@dataclass(frozen=True)
class Slowness:
    """How slow a rank is.

    Attributes:
        rank: its number.
        compute: mean seconds of a step's compute.
        score: the fastest rank's `compute` over this one's; 1 for the fastest.
        kind: `"none"` also where there are too few steps to tell.
        factor: how many times as long as usual its slow steps take; 1 for none.
        share: of its steps that are slow, 0 to 1.
        burst: steps that a burst lasts, the median; 0 unless the kind is bursts.
        period: steps from one burst's begin to the next one's, the median; 0 unless there are two bursts or more.
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
        """What the rank does, to go on after its name."""
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
    """The steps of one rank: its usual level, as a logarithm of seconds, and which steps are slow."""

    usual: float
    error: float
    slow: Flags
    higher: float  # of slow steps, over the usual level; a logarithm


def of_job(ranks: list[int], compute: Floats) -> list[Slowness]:
    """How slow each rank is.

    Args:
        ranks: their numbers.
        compute: seconds, of the shape (steps, ranks), with the same steps of all ranks.
    """
    compute = np.maximum(compute, 1e-6)  # times are whole microseconds
    means = compute.mean(axis=0)
    scores = means.min() / means
    plain = [Slowness(rank, float(mean), float(score)) for rank, mean, score in zip(ranks, means, scores, strict=True)]
    if len(compute) < LEAST_STEPS:
        return plain
    times = np.log(compute)
    splits = [_split(column) for column in _own(times).T]
    # A rank or two that are faster than all others (of 5 or more) make the others no slow ones.
    normal = sorted(splits, key=lambda split: split.usual)[(len(splits) - 1) // 4]
    return [_of_rank(one, split, normal, plain) for one, split in zip(plain, splits, strict=True)]


def follows_data(compute: Floats, slow: list[Slowness]) -> bool:
    """Whether the imbalance is as where samples differ, and not machines.

    If each rank draws its samples at random, all ranks have times of one distribution, and one step says nothing of the
    next. A rank that is slow whatever it gets has a longer mean, a busy machine is busy for several steps, and hiccups stand
    out from the usual time. Times that vary by themselves from step to step on all ranks alike cannot be told from such data.

    Args:
        compute: seconds, of the shape (steps, ranks), with the same steps of all ranks.
        slow: how slow each rank is.
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
    """Logarithms of a job's times, without what the ranks have in common in a step; of the shape (steps, ranks)."""
    if times.shape[1] == 1:
        return times
    above = times - np.median(times, axis=0)
    if times.shape[1] < _FEW and _together(above) < _TOGETHER:
        return times  # nothing in common: the shortest would be taken out
    # The lower quartile: that of a step in which some ranks are slow is as in any other.
    shared = np.quantile(above, 0.25, axis=1, method="lower")
    shared = shared - np.median(shared)
    own = times - shared[:, None]
    if _spread(own) < 0.8 * _spread(times):
        return own
    # Where steps are alike the quartile is noise, and would only be added; but for steps that are long for all.
    noise = 1.4826 * np.median(np.abs(shared))
    long = shared > max(np.log(_LEAST_STEP), 5 * noise)
    return np.where(long[:, None], own, times)


def _together(above: Floats) -> float:
    """How often two ranks are on the same side of their medians less how often they are not, as a share of the steps."""
    ranks = above.shape[1]
    return float((np.sign(above).sum(axis=1) ** 2 - ranks).mean() / (ranks * (ranks - 1)))


def _spread(times: Floats) -> float:
    """The median distance of times to their rank's median."""
    return float(np.median(np.abs(times - np.median(times, axis=0))))


def _split(times: Floats) -> _Split:
    """One rank's steps in two, if they are of two kinds."""
    steps = len(times)
    least, usual = max(_LEAST_SLOW, round(_LEAST_SHARE * steps)), max(_LEAST_SLOW, round(_LEAST_USUAL * steps))
    # Single steps far out (a checkpoint, a first step) would be a part for themselves.
    low, high = np.partition(times, (least - 1, steps - least))[[least - 1, steps - least]]
    values = np.sort(np.clip(times, low, high))
    sizes = np.arange(usual, steps - least + 1)  # of the lower part
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
    """The standard error of a median, from the median of the distances to it."""
    return float(1.2533 * 1.4826 * np.median(np.abs(times - np.median(times))) / np.sqrt(len(times)))


def _of_rank(plain: Slowness, split: _Split, normal: _Split, job: list[Slowness]) -> Slowness:
    ahead = split.usual - normal.usual
    share = float(split.slow.mean())
    error = float(np.hypot(split.error, normal.error))
    # Where short steps alternate with long ones, the usual time may be that of the short ones, which make no difference.
    persistent = ahead > max(np.log(LEAST_SLOWNESS), _SURE * error) and plain.score < 1 / LEAST_SLOWNESS
    if persistent and np.expm1(ahead) > share * np.expm1(split.higher):
        return Slowness(plain.rank, plain.compute, plain.score, "persistent", float(np.exp(ahead)), 1.0)
    if not split.slow.any():
        return plain
    factor = float(np.exp(split.higher))
    if not _in_runs(split.slow):
        return Slowness(plain.rank, plain.compute, plain.score, "random", factor, share)
    burst, period = _bursts(split.slow)
    return Slowness(plain.rank, plain.compute, plain.score, "bursts", factor, share, burst, period)


def _in_runs(slow: Flags) -> bool:
    """Whether slow steps come together, by the number of runs of slow and of other steps."""
    few, many = int(slow.sum()), int((~slow).sum())
    both = few * many
    runs = 1 + int((slow[1:] != slow[:-1]).sum())
    expected = 1 + 2 * both / (few + many)
    variance = 2 * both * (2 * both - few - many) / ((few + many) ** 2 * (few + many - 1))
    return bool(variance > 0 and (runs - expected) / np.sqrt(variance) < -_SURE)


def _bursts(slow: Flags) -> tuple[float, float]:
    """Steps that bursts last, and steps from one to the next, from the change points between the two levels."""
    half = _SMOOTHED // 2
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(slow, half, mode="edge"), _SMOOTHED)
    smooth = np.pad(windows.sum(axis=1) > half, 1).astype(np.int8)
    changes = np.diff(smooth)
    begins, ends = np.flatnonzero(changes > 0), np.flatnonzero(changes < 0)
    if not len(begins):
        return 1.0, 0.0
    period = float(np.median(np.diff(begins))) if len(begins) > 1 else 0.0
    return float(np.median(ends - begins)), period
