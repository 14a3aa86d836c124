"""Arms that take turns in one job, so that what else the machine does meanwhile is the same for all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from harness.progress import progress

Arm = TypeVar("Arm")

WARM_UP = 2  # blocks of each arm
FEWEST = 2  # measured blocks of each arm


def in_turn(arms: Iterable[Arm], turn: int) -> list[Arm]:
    """Return arms in the order of a turn. All arms have each place equally often, and each arm follows each other one equally often.

    An arm finds the caches as the one before it has left them. So the order is a Williams design (E. J. Williams, "Experimental
    designs balanced for the estimation of residual effects of treatments", 1949). It is complete after as many turns as there are
    arms, and after twice as many if their number is odd.
    """
    ordered = list(arms)
    count = len(ordered)
    zigzag = [-(place // 2) if place % 2 == 0 else place // 2 + 1 for place in range(count)]  # 0, 1, -1, 2, -2
    if count % 2 == 1 and turn % 2 == 1:
        zigzag.reverse()
    return [ordered[(turn + offset) % count] for offset in zigzag]


def alternate(
    stage: str,
    arms: Mapping[str, Callable[[], None]],
    steps_module: Any,
    *,
    blocks: int,
    block: int,
    seconds: float | None = None,
    before_step: Callable[[int], None] = lambda _: None,
) -> dict[str, list[float]]:
    """On every rank: let the arms take turns in blocks of steps, in balanced orders, each behind a barrier.

    Args:
        stage: what is measured, for the bar of progress.
        arms: a step of each.
        steps_module: `harness.steps_torch` or `harness.steps_tensorflow`, whose barrier and means are used.
        blocks: of each arm, behind those of the warm-up.
        block: steps in a block.
        seconds: after which there are no more blocks, if this comes earlier.
        before_step: called with the number of each step in its block.

    Returns:
        The mean seconds of a step, in each block of each arm; means over the ranks.
    """
    measured: dict[str, list[float]] = {name: [] for name in arms}
    end = None if seconds is None else time.monotonic() + seconds
    for index in range(WARM_UP + blocks):
        if end is not None and index >= WARM_UP + FEWEST and steps_module.anyone(time.monotonic() > end):
            break
        progress(stage, index, WARM_UP + blocks)
        for name in in_turn(arms, index):
            steps_module.barrier()
            start = time.perf_counter()
            for number in range(block):
                before_step(number)
                arms[name]()
            steps_module.finish()
            if index >= WARM_UP:
                measured[name].append((time.perf_counter() - start) / block)
    means = steps_module.mean_over_ranks(list(measured.values()), "alternate.seconds")
    return dict(zip(measured, means, strict=True))
