"""Helps to decide whether `hvd.WeightedAverage` (WP-SGD, JPDC 2020) is useful, and to choose its `contraction`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from horovod_partial.checks import require


def average_is_useful(steps: Sequence[int], contraction: float) -> bool:
    """Return whether the weighted average has a better error bound than the fastest rank's model (equation 24).

    The average has it if 2 * sum(contraction^T) > sqrt(k) + k. Here k is the number of ranks. The sum is over the
    ranks, and T is how many steps fewer than the fastest rank a rank has taken.

    Args:
        steps: the steps that each rank has taken since the last average.
        contraction: the factor by which a step shrinks the distance to the solution, above 0 and at most 1.
    """
    return 2 * _total_weight(steps, contraction) > math.sqrt(len(steps)) + len(steps)


def average_converges(steps: Sequence[int], contraction: float) -> bool:
    """Return whether WP-SGD's bound on convergence holds for repeated weighted averages (section 5.1).

    The bound holds if sqrt(k) < sum(contraction^T) and k * contraction^s < sum(contraction^T). Here k is the number of
    ranks, T how many steps fewer than the fastest rank a rank has taken, and s the steps of the fastest rank. (The
    paper states only the first condition, but its factor for the mean also needs the second condition.)

    Args:
        steps: the steps that each rank takes between two averages.
        contraction: same as in `average_is_useful`.
    """
    total = _total_weight(steps, contraction)
    return math.sqrt(len(steps)) < total and len(steps) * contraction ** max(steps) < total


def _total_weight(steps: Sequence[int], contraction: float) -> float:
    """Return the sum over the ranks of contraction^T. A rank has taken T steps fewer than the fastest rank."""
    return sum(contraction ** (max(steps) - taken) for taken in steps)


def estimate_contraction(losses: Sequence[float], loss: Literal["quadratic", "linear"] = "quadratic") -> float:
    """Estimate by which factor a step shrinks the distance to the solution (WP-SGD, figure 3).

    An exponential with an unknown floor is fitted to the means of the first, second and last third of the losses.

    Args:
        losses: the losses of 6 or more successive steps of one rank, from a time when the loss still falls.
        loss: how the loss grows with the distance to the solution. `"quadratic"` is for smooth losses near their
            minimum, such as the squared error: the factor of the distance is the square root of the loss's factor.
            `"linear"` is for losses such as the hinge, where both factors are equal.

    Returns:
        The factor, between 0 and 1: `contraction` of `hvd.WeightedAverage`.

    Raises:
        ValueError: the losses do not fall like an exponential, or are not numbers, or `loss` is another word.
    """
    require(loss in ("quadratic", "linear"), "loss", "'quadratic' or 'linear'", loss)
    try:
        values = [float(value) for value in losses]
    except (TypeError, ValueError):
        require(False, "losses", "a sequence of numbers", losses)
    third = len(values) // 3
    if third < 2:
        raise ValueError(f"6 or more losses are needed, not {len(values)}")
    first, second, last = (sum(values[i * third : (i + 1) * third]) / third for i in range(3))
    if not math.inf > first > second > last or not first - second > second - last:
        raise ValueError(
            f"the losses do not decay exponentially: the means of their thirds are {first:g}, {second:g}, {last:g}"
        )
    of_loss = float(((second - last) / (first - second)) ** (1 / third))
    return math.sqrt(of_loss) if loss == "quadratic" else of_loss
