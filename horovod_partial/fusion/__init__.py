"""Which gradients travel in one message: merged by an optimal plan from measured times (MG-WFBP, INFOCOM'19, TPDS 2021)."""

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
THRESHOLD_BYTES = 64 * 2**20  # of Horovod's own tensor fusion

_LEAST_R_SQUARED = 0.95


@dataclass(frozen=True)
class MessageCost:
    """What a message of M bytes costs: `latency + seconds_per_byte * M` seconds; the paper's a and b (section 2.5).

    Attributes:
        latency: seconds, a.
        seconds_per_byte: b.
        r_squared: of the fit; 1 for numbers that were not fitted.
    """

    latency: float
    seconds_per_byte: float
    r_squared: float = 1.0

    @classmethod
    def fit(cls, sizes: Sequence[int], seconds: Sequence[float]) -> MessageCost:
        """The line through measured times.

        Its slope is the median of the slopes of all pairs, each counted by the distance of its sizes (Theil and Sen), so
        outliers do not count.

        Args:
            sizes: bytes of the messages, at least three different ones.
            seconds: what each took, best the median of several.

        Raises:
            ValueError: the times do not lie on a line; the text says how.
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
        # A link that lets a burst pass makes small messages cheap, and the line begins below 0.
        return cls(max(latency, 0.0), slope, r_squared)


@dataclass(frozen=True)
class FusionPlan:
    """Which gradients travel together, and why.

    Attributes:
        rule: that made it, of `hvd.MergedGradients`.
        gradients: names of the parameters, in the order in which backward makes their gradients.
        nbytes: of each gradient, on the wire.
        ready: when each gradient was there, in seconds after the first, median of the measured steps.
        messages: how many gradients each message has, in that order.
        cost: of a message; None where measuring it failed.
        around: seconds of a step before the first gradient and after the last result, median of the measured steps.
        reason: why this is the default plan in place of the rule's; "" if it is not.
        measured: seconds of an iteration under this plan, median of some steps; None before those were taken.
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
        """Seconds of an iteration, as the cost model has it; None without one."""
        return None if self.cost is None else self.around + self.duration(self.cost)

    def duration(self, cost: MessageCost) -> float:
        """Seconds from the first gradient to the last result, if messages cost that."""
        messages = _core.fusion_messages(
            list(self.messages), self.ready, self.nbytes, cost.latency, cost.seconds_per_byte
        )
        return messages[-1][1] if messages else 0.0

    def by_rule(self, rule: str, cost: MessageCost) -> FusionPlan:
        """The plan that a rule makes from the same times."""
        # Where times begin anew, so does a dtype or device.
        breaks = [i for i in range(1, len(self.ready)) if self.ready[i] < self.ready[i - 1]]
        return plan(rule, self.gradients, self.nbytes, self.ready, cost, breaks=breaks, around=self.around)

    def names(self) -> list[list[str]]:
        """The parameters of each message."""
        names = iter(self.gradients)
        return [list(itertools.islice(names, count)) for count in self.messages]

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan as JSON."""
        documents.save(self, path)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> FusionPlan:
        """Read what `save` wrote.

        Raises:
            ValueError: the file is something else.
        """
        return cls.of_document(documents.load(path, "fusion plan"), path)

    @classmethod
    def of_document(cls, document: Any, path: str | PathLike[str]) -> FusionPlan:
        """What the file at `path` holds. Raises as `load` does."""
        plan = documents.read_as(cls, document, path, "fusion plan")
        fits = len(plan.gradients) == len(plan.nbytes) == len(plan.ready) == sum(plan.messages)
        if not fits or any(count < 1 for count in plan.messages) or any(nbytes < 0 for nbytes in plan.nbytes):
            raise ValueError(f"{path} holds no fusion plan: its parts do not fit each other")
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
    cost: MessageCost,
    *,
    breaks: Sequence[int] = (),
    around: float = 0.0,
) -> FusionPlan:
    """A plan by a rule.

    Args:
        rule: `"exact"`, `"paper"`, `"wait_free"`, `"single"` or `"threshold"`, as in `hvd.MergedGradients`.
        gradients: names, in the order in which backward makes them.
        nbytes: of each.
        ready: seconds after some moment at which each is there; never less than the one before.
        cost: of a message.
        breaks: positions before which a message must end, because the gradients there cannot travel together. Each part
            is planned as if the line were free then.
        around: as in `FusionPlan`.
    """
    messages: list[int] = []
    for first, last in itertools.pairwise([0, *breaks, len(gradients)]):
        messages += _core.plan_fusion(
            rule, ready[first:last], nbytes[first:last], cost.latency, cost.seconds_per_byte, THRESHOLD_BYTES
        )
    return FusionPlan(rule, tuple(gradients), tuple(nbytes), tuple(ready), tuple(messages), cost, around)


@dataclass(frozen=True)
class MergedGradients:
    """Gradients travel in messages that a plan from measured times makes (MG-WFBP, INFOCOM'19 and IEEE TPDS 2021).

    Merging saves a message's latency, and waiting for the next gradient costs time in which nothing is sent. During the
    first steps the times at which backward makes gradients, and what messages cost, are measured on the way that the
    training itself takes; then rank 0's plan replaces the buckets between two steps, on all ranks.

    The paper calls its rule (`"paper"`) optimal. Under its own model it is not: `"exact"` is, at the same cost.

    Args:
        rule: `"exact"`; `"paper"`, its Algorithm 1 (section 4.2); `"wait_free"`, a message for each gradient;
            `"single"`, one message; `"threshold"`, what is ready when the line is free, up to 64 MiB, as Horovod's
            tensor fusion.
        warmup_steps: to measure, 2 or more, after the first. Every rank must take one step more than that.
        replan_every: steps after which times are measured again; a plan that is more than 5 % better then replaces the
            old one. None never does. Ranks wait for each other there, unless one has left.
        plan: an `hvd.FusionPlan`, or a file that its `save` wrote, to use after the first step without measuring.
    """

    rule: str = "exact"
    warmup_steps: int = 10
    replan_every: int | None = 1000
    plan: FusionPlan | str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"rule must be one of {', '.join(map(repr, RULES))}, not {self.rule!r}")
        require_count("warmup_steps", self.warmup_steps, 2)
        if self.replan_every is not None:
            require_count("replan_every", self.replan_every, 1)
            if self.replan_every <= self.warmup_steps:
                raise ValueError(f"replan_every must be more than warmup_steps, not {self.replan_every}")
        if self.plan is not None and not isinstance(self.plan, FusionPlan):
            require(isinstance(self.plan, str | PathLike), "plan", "an hvd.FusionPlan, or a file", self.plan)
            object.__setattr__(self, "plan", FusionPlan.load(self.plan))
