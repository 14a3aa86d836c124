"""Checks of single arguments, with the same words everywhere.

What is wrong raises ValueError, as in Horovod, also where it is the type: users catch one error for a wrong argument.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from numbers import Integral, Real
from typing import Any


def require(fits: bool, name: str, allowed: str, value: Any) -> None:
    """Refuse an argument that does not fit.

    Args:
        fits: whether it does.
        name: of the argument.
        allowed: what it must be, in words.
        value: what was given.

    Raises:
        ValueError: it does not; in one line.
    """
    if not fits:
        shown = " ".join(repr(value).split())  # optimizers and models take many lines
        raise ValueError(f"{name} must be {allowed}, not {shown if len(shown) <= 200 else shown[:200] + '...'}")


def require_count(name: str, value: Any, least: int) -> None:
    """Refuse what is no number of things, such as ranks or steps; the core has 32 bits for those."""
    bound = " and below 2**31" if is_int(value) and value >= 2**31 else ""
    require(is_int(value) and least <= value < 2**31, name, f"an int, {least} or more{bound}", value)


def is_int(value: Any) -> bool:
    """Whether a value is a whole number, of Python or NumPy; True and False are none."""
    return not isinstance(value, bool) and isinstance(value, Integral)


def is_number(value: Any) -> bool:
    """Whether a value is a finite number, of Python or NumPy; True and False are none."""
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)


def is_flag(value: Any) -> bool:
    """Whether a value says yes or no; 1 and 0 do, as from a command line."""
    return isinstance(value, Hashable) and value in (True, False)
