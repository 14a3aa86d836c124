"""The part of horovod_partial that needs no Horovod."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

class _Fields:
    """A C++ structure of cpp/core, with its fields as attributes. Enumerations are names, and times are seconds."""

    def __init__(self, **fields: Any) -> None: ...
    def replace(self, **fields: Any) -> Self: ...
    def __getattr__(self, name: str) -> Any: ...

class Schedule(_Fields):
    def groups(self, round: int, size: int) -> list[list[int]]: ...

class Policy(_Fields): ...

class BucketSpec(_Fields):
    def encode(self) -> bytes: ...

def contraction_weights(steps: list[int], contraction: float) -> list[float]: ...
def staleness_weights(iterations: list[int], alpha: float) -> list[float]: ...

class Periods:
    def __init__(self, length: int) -> None: ...
    def take_step(self) -> None: ...
    def must_signal(self, ended: int) -> bool: ...
    def is_over(self, ended: int) -> bool: ...
    def begin_next(self) -> int: ...
    def begin_anew(self, ended: int) -> None: ...
    def work(self) -> int: ...

def plan_merging(
    rule: str,
    ready: Sequence[float],
    bytes: Sequence[float],
    latency: float,
    seconds_per_byte: float,
    threshold_bytes: float,
) -> list[int]: ...
def merging_messages(
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
    overlap: bool,
    late: str,
    policy: Policy,
) -> dict[str, Any]: ...
def run_shared_job(
    *,
    in_first: NDArray[np.float64],
    in_each: NDArray[np.float64],
    in_own: NDArray[np.float64],
    ready: Sequence[float],
    bytes: Sequence[float],
    compute: float,
    cost: tuple[float, float],
    cycle: float,
) -> tuple[list[float], NDArray[np.intc], list[float]]: ...

class Slowness(_Fields):
    def describe(self) -> str: ...

class SlowRanks:
    """Finds out which ranks are slow, from the compute times of all ranks in each step."""

    def __init__(self, size: int) -> None: ...
    def step(self, seconds: Sequence[float] | NDArray[np.float64]) -> list[tuple[str, Slowness]]: ...
    def found(self, rank: int) -> list[Slowness]: ...

PARTS: tuple[str, ...]  # the names of the parts of a step, in the order of `SlowParts.step`

class SlowParts:
    """Finds out which part of a step explains why a rank is slow, from the parts of all ranks in each step."""

    def __init__(self, size: int) -> None: ...
    def step(self, parts: NDArray[np.float64]) -> None: ...
    def cause(self, rank: int) -> tuple[str, str]: ...
