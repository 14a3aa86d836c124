"""Checks of single arguments, whose errors have the same wording everywhere.

A wrong argument raises ValueError, even if its type is wrong. Horovod does the same.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from numbers import Integral, Real
from typing import Any


def require(fits: bool, name: str, allowed: str, value: Any) -> None:
    """Raise a ValueError of one line unless an argument `fits`. `allowed` says in words which values fit."""
    if not fits:
        shown = " ".join(repr(value).split())  # an error message has one line, so remove line breaks
        raise ValueError(f"{name} must be {allowed}, not {shown if len(shown) <= 200 else shown[:200] + '...'}")


def require_count(name: str, value: Any, least: int) -> None:
    """Raise a ValueError unless `value` is an int from `least` to 2**31 - 1, the range of counts in the core."""
    bound = " and below 2**31" if is_int(value) and value >= 2**31 else ""
    require(is_int(value) and least <= value < 2**31, name, f"an int, {least} or more{bound}", value)


def is_int(value: Any) -> bool:
    """Return whether a value is an integer of Python or NumPy. True and False do not count."""
    return not isinstance(value, bool) and isinstance(value, Integral)


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number of Python or NumPy. True and False do not count."""
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)


def is_flag(value: Any) -> bool:
    """Return whether a value can be used as a flag: True, False, 1 or 0."""
    return isinstance(value, Hashable) and value in (True, False)
