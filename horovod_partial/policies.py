"""Sync policies: when may a round of a collective close, and who waits?

A policy says nothing about data; see `docs/policies.md` for how to choose one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Full:
    """Every rank waits for every other: Horovod's own collective, bit for bit."""


@dataclass(frozen=True)
class Solo:
    """The first rank that arrives closes the round; nobody waits (eager-SGD, PPoPP'20, section 3)."""


@dataclass(frozen=True)
class Majority:
    """A round closes when at least half of the ranks have arrived.

    Args:
        initiator: None for the guarantee; `"random"` for the paper's statistical form (eager-SGD, PPoPP'20, section 3):
            one rank is drawn for each round, and the round closes when that rank has arrived. On average half of the
            ranks are then on time, but a single round may have one.
        seed: of the draws, for `initiator="random"`; the same on every rank.
    """

    initiator: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.initiator not in (None, "random"):
            raise ValueError(f"initiator must be None or 'random', not {self.initiator!r}")


@dataclass(frozen=True)
class Quorum:
    """A round closes when `ranks` ranks have arrived, or that share of them.

    Args:
        ranks: a number of ranks, 1 or more (an int), or a share of all ranks, above 0 and up to 1 (a float). More ranks
            than there are means all of them.
    """

    ranks: int | float
    # 1 is one rank and 1.0 is all of them, although the numbers are equal.
    is_share: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_share", isinstance(self.ranks, float))
        if isinstance(self.ranks, bool) or not isinstance(self.ranks, (int, float)):
            raise TypeError(f"ranks must be an int or a float, not {self.ranks!r}")
        if isinstance(self.ranks, int) and self.ranks < 1:
            raise ValueError(f"ranks must be 1 or more, not {self.ranks}")
        if isinstance(self.ranks, float) and not 0.0 < self.ranks <= 1.0:
            raise ValueError(f"a share of the ranks must be above 0 and at most 1, not {self.ranks}")


Policy = Full | Solo | Majority | Quorum


def parse(text: str) -> Policy:
    """The policy that `text` names: `full`, `solo`, `majority`, `majority:random`, `quorum:3` or `quorum:0.75`."""
    name, _, argument = text.strip().lower().partition(":")
    try:
        if name == "full" and not argument:
            return Full()
        if name == "solo" and not argument:
            return Solo()
        if name == "majority":
            return Majority(initiator=argument or None)
        if name == "quorum" and argument:
            return Quorum(int(argument) if argument.isdigit() else float(argument))
    except ValueError as error:
        raise ValueError(f"invalid sync policy {text!r}: {error}") from None
    raise ValueError(
        f"unknown sync policy {text!r}; known are full, solo, majority, majority:random, and quorum:N with a number of "
        "ranks or a share of them"
    )


def resolve(sync: Policy | str | None, default: Policy | str) -> Policy:
    """The policy that an argument stands for: a policy, a policy's text, or None for the default."""
    chosen = default if sync is None else sync
    if isinstance(chosen, str):
        return parse(chosen)
    if not isinstance(chosen, (Full, Solo, Majority, Quorum)):
        raise TypeError(f"sync must be a policy such as hvd.Majority(), or its name, not {chosen!r}")
    return chosen


def rule(policy: Policy, size: int) -> dict[str, Any]:
    """What the core needs to know of a partial policy on `size` ranks."""
    match policy:
        case Solo():
            return {"rule": "quorum", "quorum": 1, "seed": 0}
        case Majority(initiator="random", seed=seed):
            return {"rule": "initiator", "quorum": 1, "seed": seed}
        case Majority():
            return {"rule": "quorum", "quorum": math.ceil(size / 2), "seed": 0}
        case Quorum(ranks=int(ranks)):
            return {"rule": "quorum", "quorum": min(ranks, size), "seed": 0}
        case Quorum(ranks=ranks):
            # 0.55 of 20 ranks is 11, although the product is a little more.
            return {"rule": "quorum", "quorum": max(1, math.ceil(round(ranks * size, 9))), "seed": 0}
    raise TypeError(f"{policy!r} has no rounds: it is Horovod's own collective")
