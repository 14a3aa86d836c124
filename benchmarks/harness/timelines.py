"""Horovod's timeline (HOROVOD_TIMELINE), which rank 0 writes, read back."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Activity(NamedTuple):
    """What Horovod did with a tensor, by the clock of `time.perf_counter`. A timeline has inner activities first."""

    tensor: int
    name: str
    begin: float
    end: float


def activities(timeline: Path) -> Iterator[Activity]:
    """All that have ended. What had begun before the timeline did is left out."""
    begun: dict[int, list[tuple[str, float]]] = defaultdict(list)  # by tensor: the innermost last
    start, *events = json.loads(timeline.read_text())
    # The Unix time at which the clock was 0. A thread that is interrupted between the two calls finds less.
    epoch = max(time.time() - time.perf_counter() for _ in range(5))
    zero = start["args"]["start_time_since_epoch_in_micros"] / 1e6 - epoch
    for event in events:
        if event["ph"] == "B":
            begun[event["pid"]].append((event["name"], zero + event["ts"] / 1e6))
        elif event["ph"] == "E" and begun[event["pid"]]:
            yield Activity(event["pid"], *begun[event["pid"]].pop(), zero + event["ts"] / 1e6)
