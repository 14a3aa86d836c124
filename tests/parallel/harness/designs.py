"""Cases that meet each pair of values, instead of all combinations."""

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any


def pairwise(axes: Mapping[str, Sequence[Any]], least: int, seed: int) -> list[dict[str, Any]]:
    """At least `least` cases in which every value of an axis meets every value of every other axis.

    Each case is the best of some random ones: it has the most pairs that none before it has.
    """
    rng = random.Random(seed)
    names = list(axes)

    def pairs(case: Mapping[str, Any]) -> set[tuple[Any, ...]]:
        return {(a, case[a], b, case[b]) for a, b in itertools.combinations(names, 2)}

    missing = {(a, x, b, y) for a, b in itertools.combinations(names, 2) for x in axes[a] for y in axes[b]}
    cases: list[dict[str, Any]] = []
    while missing or len(cases) < least:
        drawn = [{name: rng.choice(list(values)) for name, values in axes.items()} for _ in range(50)]
        best = max(drawn, key=lambda case: len(pairs(case) & missing))
        missing -= pairs(best)
        cases.append(best)
    return cases
