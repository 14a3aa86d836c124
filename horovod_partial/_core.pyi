"""The part of horovod_partial that needs no Horovod."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

def packed_offsets(elements: list[int], element_bytes: int) -> list[int]: ...
def groups_of(schedule: str, group_size: int, table: list[list[int]], round: int, size: int) -> list[list[int]]: ...
def cycle_of(schedule: str, group_size: int, table: list[list[int]], size: int) -> int: ...
def contraction_weights(steps: list[int], contraction: float) -> list[float]: ...
def staleness_weights(iterations: list[int], alpha: float) -> list[float]: ...
def plan_merges(
    rule: str,
    ready: Sequence[float],
    bytes: Sequence[float],
    latency: float,
    seconds_per_byte: float,
    threshold_bytes: float,
) -> list[int]: ...
def merge_messages(
    plan: Sequence[int], ready: Sequence[float], bytes: Sequence[float], latency: float, seconds_per_byte: float
) -> list[tuple[float, float, float]]: ...
def run_job(
    *,
    delays: NDArray[np.float64],
    ready: Sequence[float],
    bytes: Sequence[float],
    compute: float,
    costs: Sequence[tuple[float, float]],
    cycle: float,
    average_period: int,
    late: str,
    rule: str,
    quorum: int,
    seed: int,
    max_staleness: int,
    grace_seconds: float,
    schedule: str,
    group_size: int,
    table: list[list[int]],
    period: int,
    window: int,
) -> dict[str, Any]: ...

class Replay:
    @property
    def decisions(self) -> int: ...
    @property
    def rounds(self) -> int: ...
    @property
    def difference(self) -> str: ...

def replay(path: str) -> Replay: ...

class Simulation:
    def __init__(
        self,
        size: int,
        *,
        rule: str = "quorum",
        quorum: int = 1,
        seed: int = 0,
        max_staleness: int = 16,
        grace_seconds: float = 0.0,
        missed: str = "sum",
    ) -> None: ...
    def arrive(self, rank: int, bucket: str, value: float) -> tuple[str, list[float]]: ...
    def cycle(self, now_seconds: float) -> list[tuple[str, int, str, list[tuple[int, bool]]]]: ...
    def finish(self, rank: int, bucket: str) -> list[float]: ...
    def collect(self, rank: int, bucket: str) -> list[float]: ...
    def set_blocked(self, rank: int, blocked: bool) -> None: ...
    def set_flush(self, rank: int, flush: str) -> None: ...
    def join(self, rank: int) -> None: ...
