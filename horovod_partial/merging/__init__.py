"""Plans which gradients travel in one message, from measured times (MG-WFBP, INFOCOM'19 and IEEE TPDS 2021)."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

from horovod_partial import _core, documents
from horovod_partial.checks import require, require_count

RULES = ("exact", "paper", "wait_free", "single", "threshold")
# The rule "measured" tries the plans of these rules in training, and keeps the fastest plan.
# "wait_free" sends a message for each gradient. Horovod's fusion merges small messages that are ready in one cycle.
TRIED = ("exact", "paper", "single", "wait_free")
TRIED_WITHOUT_COST = ("single", "wait_free")  # rules whose plans do not depend on what messages cost
THRESHOLD_BYTES = 128 * 2**20  # the most bytes that Horovod's own tensor fusion merges by default

_LEAST_R_SQUARED = 0.95


@dataclass(frozen=True)
class MessageCost:
    """The cost of a message of M bytes: `latency + seconds_per_byte * M` seconds (MG-WFBP, section 2.5).

    The paper calls the latency a, and the seconds per byte b. `r_squared` is R² of the fit, or 1 without a fit.
    """

    latency: float
    seconds_per_byte: float
    r_squared: float = 1.0

    @classmethod
    def fit(cls, sizes: Sequence[int], seconds: Sequence[float]) -> MessageCost:
        """Fit the cost of messages to measured times, by a line.

        The slope is the median of the slopes between all pairs, weighted by the difference of their sizes (Theil and
        Sen). So outliers have little influence. There must be three different sizes or more, in bytes. The time of each
        size should be a median of several times. Raises ValueError if the times do not lie on a line, and says why.
        """
        if len(set(sizes)) < 3:
            raise ValueError("a fit needs messages of three sizes or more")
        points = sorted(zip(sizes, seconds, strict=True))
        slopes = sorted(
            ((t[1] - s[1]) / (t[0] - s[0]), t[0] - s[0]) for s, t in itertools.combinations(points, 2) if s[0] < t[0]
        )
        reached = itertools.accumulate(distance for _, distance in slopes)
        half = sum(distance for _, distance in slopes) / 2
        slope = next(slope for (slope, _), distance in zip(slopes, reached, strict=True) if distance >= half)
        latency = statistics.median(y - slope * x for x, y in points)
        mean = statistics.fmean(seconds)
        total = sum((y - mean) ** 2 for y in seconds)
        residual = sum((y - latency - slope * x) ** 2 for x, y in zip(sizes, seconds, strict=True))
        r_squared = 1.0 - residual / total if total > 0 else 0.0
        if slope <= 0:
            raise ValueError(f"the times of messages do not grow with their size ({slope:.3g} s/B)")
        if r_squared < _LEAST_R_SQUARED:
            raise ValueError(
                f"the times of messages do not lie on a line (R² {r_squared:.2f}, {_LEAST_R_SQUARED} is needed); the "
                "machine or its network was busy"
            )
        # If a network lets short bursts pass, small messages are cheap, and the fitted latency may be below 0: take 0.
        return cls(max(latency, 0.0), slope, r_squared)


@dataclass(frozen=True)
class MergingPlan:
    """Says which gradients travel together, and why.

    Attributes:
        rule: the rule that made the plan, one of `horovod_partial.merging.RULES`.
        gradients: names of the parameters, in the order in which backward computes their gradients.
        nbytes: how many bytes travel for each gradient.
        ready: when each gradient was computed, in seconds after the first gradient: the median of the measured steps,
            from the slowest rank.
        messages: the number of gradients in each message, in the order of `gradients`.
        cost: the cost of a message; None if it could not be measured.
        around: the time of a step before its first gradient and after its last result, in seconds: the median of the
            measured steps, from the slowest rank.
        reason: why this plan only repeats the buckets without merging; empty if the rule made the plan.
        measured: the median time of an iteration under this plan, in seconds, and after a trial the mean of all ranks;
            None before it has been measured.
    """

    rule: str
    gradients: tuple[str, ...]
    nbytes: tuple[int, ...]
    ready: tuple[float, ...]
    messages: tuple[int, ...]
    cost: MessageCost | None = None
    around: float = 0.0
    reason: str = ""
    measured: float | None = None

    @property
    def predicted(self) -> float | None:
        """The time of an iteration in seconds, predicted from `cost`; None if `cost` is None."""
        return None if self.cost is None else self.around + self.duration(self.cost)

    def duration(self, cost: MessageCost) -> float:
        """Return the seconds from a step's first gradient to its last result, predicted from the cost of messages."""
        messages = _core.merging_messages(
            list(self.messages), self.ready, self.nbytes, cost.latency, cost.seconds_per_byte
        )
        return messages[-1][1] if messages else 0.0

    def by_rule(self, rule: str, cost: MessageCost) -> MergingPlan:
        """Return the plan that a rule makes from the times of this plan's gradients and the given cost of messages."""
        # A plan sorts gradients of one dtype and device by time. Where times decrease, another dtype or device begins.
        breaks = [i for i in range(1, len(self.ready)) if self.ready[i] < self.ready[i - 1]]
        return plan(rule, self.gradients, self.nbytes, self.ready, cost, breaks=breaks, around=self.around)

    def names(self) -> list[list[str]]:
        """Return for each message of the plan the names of its gradients' parameters."""
        names = iter(self.gradients)
        return [list(itertools.islice(names, count)) for count in self.messages]

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan of merged gradients to a JSON file."""
        documents.save(self, path)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> MergingPlan:
        """Read a plan of merged gradients from a file that `save` wrote.

        Raises:
            ValueError: the file holds no plan.
        """
        return cls.of_document(documents.load(path, "merging plan"), path)

    @classmethod
    def of_document(cls, document: Any, path: str | PathLike[str]) -> MergingPlan:
        """Convert the content of the JSON file at `path` to a plan. Raises ValueError if it is not a plan."""
        plan = documents.read_as(cls, document, path, "merging plan")
        fits = len(plan.gradients) == len(plan.nbytes) == len(plan.ready) == sum(plan.messages)
        if not fits or any(count < 1 for count in plan.messages) or any(nbytes < 0 for nbytes in plan.nbytes):
            raise ValueError(f"{path} holds no merging plan: its parts do not fit each other")
        return plan

    def __str__(self) -> str:
        kind = f"default plan ({self.reason})" if self.reason else f"rule {self.rule}"
        text = f"{kind}: {len(self.gradients)} gradients, {sum(self.nbytes) / 1e6:.1f} MB, in {len(self.messages)} messages"
        if self.cost is not None:
            text += (
                f"; a message costs {self.cost.latency * 1e3:.3g} ms + {self.cost.seconds_per_byte * 1e9:.3g} ns/B "
                f"(R² {self.cost.r_squared:.3f}); predicted {self.predicted:.4g} s an iteration"
            )
        if self.measured is not None:
            text += f", measured {self.measured:.4g} s"
        return text


def plan(
    rule: str,
    gradients: Sequence[str],
    nbytes: Sequence[int],
    ready: Sequence[float],
    cost: MessageCost | None,
    *,
    breaks: Sequence[int] = (),
    around: float = 0.0,
) -> MergingPlan:
    """Plan which gradients travel together, by one of `RULES`. The rules `TRIED_WITHOUT_COST` need no cost.

    Gradients are in the order in which backward computes them. `nbytes` are their bytes. `ready` are the times when
    backward has computed them, in seconds after any moment. Gradients on both sides of a position in `breaks` cannot
    travel in one message, and times in `ready` may decrease only there. The part after a break is planned as if the
    network were idle at its start. `around` is the time of a step before its first gradient and after its last result.
    """
    line = (0.0, 0.0) if cost is None else (cost.latency, cost.seconds_per_byte)
    messages: list[int] = []
    for first, last in itertools.pairwise([0, *breaks, len(gradients)]):
        messages += _core.plan_merging(rule, ready[first:last], nbytes[first:last], *line, THRESHOLD_BYTES)
    return MergingPlan(rule, tuple(gradients), tuple(nbytes), tuple(ready), tuple(messages), cost, around)


@dataclass(frozen=True)
class MergedGradients:
    """Merges gradients into messages by a plan from measured times (MG-WFBP, INFOCOM'19 and IEEE TPDS 2021).

    Merging gradients saves the latency of messages, but a message is sent only when its last gradient is computed.
    During the first steps ranks measure when backward computes each gradient, and what messages cost, with the same
    collectives as the training. Then, between two steps, all ranks replace their buckets by the messages of a plan.

    The paper calls its rule (`"paper"`) optimal. By the paper's model only `"exact"` is optimal, in O(n²) time too. But
    the model ignores other costs of messages, such as the cores that they take from backward. So plans are also tried.

    Args:
        rule: the rule of the plan. `"measured"` tries the plans of `"exact"`, `"paper"`, `"single"` and `"wait_free"` for
            `warmup_steps` steps each, and keeps the fastest. If the cost of messages cannot be measured, it tries
            `"single"`, `"wait_free"` and the buckets without merging. `"exact"` is optimal if messages cost what was
            measured; `"paper"` is the paper's Algorithm 1 (section 4.2); `"wait_free"` sends a message for each
            gradient, and Horovod's tensor fusion joins those below 4 MiB that are ready together; `"single"` sends one
            message; `"threshold"` sends what is ready when the network is idle, up to 128 MiB. Gradients of different
            dtypes or devices never travel in one message.
        warmup_steps: how many steps to measure, 2 or more. Every rank must take at least one step more, because the
            first step is not measured.
        replan_every: after how many steps ranks measure again, then make or try new plans. None keeps a plan for ever.
            Ranks first wait for each other. If a rank does not come, the plan stays for `replan_every` more steps.
        plan: a `MergingPlan`, or a file that `MergingPlan.save` wrote. It is used after the first step, unmeasured.
    """

    rule: str = "measured"
    warmup_steps: int = 10
    replan_every: int | None = 1000
    plan: MergingPlan | str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        rules = ("measured", *RULES)
        require(self.rule in rules, "rule", f"one of {', '.join(map(repr, rules))}", self.rule)
        require_count("warmup_steps", self.warmup_steps, 2)
        if (steps := self.replan_every) is not None:
            require_count("replan_every", steps, 1)
            if steps <= self.warmup_steps:
                raise ValueError(f"replan_every must be more than warmup_steps, not {steps}")
            least = (1 + len(TRIED)) * (self.warmup_steps + 1)
            fits = self.rule != "measured" or steps >= least
            require(fits, "replan_every", f"{least} or more for the trial of all plans", steps)
        if self.plan is not None and not isinstance(self.plan, MergingPlan):
            require(isinstance(self.plan, str | PathLike), "plan", "a MergingPlan, or a file", self.plan)
            object.__setattr__(self, "plan", MergingPlan.load(self.plan))

    @property
    def agreed(self) -> str:
        """Describe the options that must be the same on every rank."""
        again = "never again" if self.replan_every is None else f"again after {self.replan_every}"
        return f"{self.rule}, {self.warmup_steps} steps, {again}{', a plan' if self.plan else ''}"
