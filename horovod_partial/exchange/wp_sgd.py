"""What averages by work are worth (WP-SGD, JPDC 2020), and the contraction of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from horovod_partial.checks import require


def average_is_useful(steps: Sequence[int], contraction: float) -> bool:
    """Whether the weighted average has a better bound than the fastest rank's model alone (WP-SGD, equation 24).

    True if 2 * sum(contraction^T) > sqrt(k) + k, for k ranks that have taken T steps fewer than the fastest.
    """
    return 2 * _total_weight(steps, contraction) > math.sqrt(len(steps)) + len(steps)


def average_converges(steps: Sequence[int], contraction: float) -> bool:
    """Whether averages of this kind, again and again, keep the bound of WP-SGD (section 5.1).

    True if sqrt(k) < sum(contraction^T) and k * contraction^s < sum(contraction^T), with s the steps of the fastest. (The
    paper states the first only; its factor for the mean needs the second.)
    """
    total = _total_weight(steps, contraction)
    return math.sqrt(len(steps)) < total and len(steps) * contraction ** max(steps) < total


def _total_weight(steps: Sequence[int], contraction: float) -> float:
    """The sum over the ranks of contraction^T, for T steps fewer than the fastest."""
    return sum(contraction ** (max(steps) - taken) for taken in steps)


def estimate_contraction(losses: Sequence[float], loss: Literal["quadratic", "linear"] = "quadratic") -> float:
    """The contraction of a step, from the losses of successive steps of one rank (WP-SGD, figure 3).

    Fits an exponential with an unknown floor, from the means of the first, second and last third. The contraction is that of
    the distance to the solution, and how it follows from the loss's depends on the loss.

    Args:
        losses: of 6 or more successive steps, before the loss has stopped falling.
        loss: how the loss grows with the distance to the solution: `"quadratic"` for smooth losses near their minimum, such
            as the squared error, of whose contraction the square root is taken; `"linear"` for losses such as the hinge, whose
            contraction is that of the distance.

    Raises:
        ValueError: the losses do not fall like an exponential, or are no numbers; or `loss` is another word.
    """
    if loss not in ("quadratic", "linear"):
        raise ValueError(f"loss must be 'quadratic' or 'linear', not {loss!r}")
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
