"""The steps of merged gradients, which the library of TensorFlow's operations keeps: `cpp/core/merged_steps.h`."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod_partial.tensorflow.graph import library

_NUMBERS = ctypes.POINTER(ctypes.c_int64)
_MESSAGES = [ctypes.c_int64, _NUMBERS, _NUMBERS]


def _function(name: str, result: Any, arguments: Sequence[Any]) -> Any:
    function = library[f"horovod_partial_{name}"]
    function.restype = result
    function.argtypes = [ctypes.c_char_p, *arguments]
    return function


_declare = _function(
    "declare_steps", ctypes.c_bool, [ctypes.c_int64, _NUMBERS, *_MESSAGES, ctypes.c_int64, ctypes.c_int64]
)
_begin = _function("begin_step", None, [ctypes.c_int])
_plans = _function("plans", ctypes.c_int64, [])
_plan = _function("plan_steps", ctypes.c_bool, [*_MESSAGES, ctypes.c_int64])
_times = _function("step_times", ctypes.c_int64, [ctypes.c_bool, ctypes.POINTER(ctypes.c_double)])


class FusionSteps:
    """The steps of one optimizer or tape. Kernels find them by name; Python declares them, reads times and replaces the plan.

    Args:
        name: of the buckets.
        elements: of each gradient.
        messages: positions of the gradients in each message, before there is a plan.
        due: steps before the first plan.
        window: steps to measure.
    """

    def __init__(
        self,
        name: str,
        elements: Sequence[int],
        messages: Sequence[Sequence[int]],
        due: int,
        window: int,
    ) -> None:
        self._name = name.encode()
        self._width = len(elements) + 1
        self._rows = window + 1
        declared = _declare(self._name, len(elements), _array(elements), *_flat(messages), due, window)
        assert declared, "messages that are given have each gradient once"

    def begin(self, process_set: int) -> None:
        """All gradients of a step are there, in eager code."""
        _begin(self._name, process_set)

    @property
    def plans(self) -> int:
        """How many there have been since Horovod was initialised."""
        return int(_plans(self._name))

    def plan(self, messages: Sequence[Sequence[int]] | None, due: int | None) -> None:
        """Between two steps: the messages from now on, if they change, and after how many steps to plan anew, if ever."""
        planned = _plan(self._name, *_flat(messages or []), due or 0)
        assert planned, "a plan that has been checked fits"

    def times(self, *, first: bool) -> list[list[float]]:
        """Of the first steps under the plan in use, or of the last: seconds of each gradient, NaN if it did not come, and
        of the step's end. At most `window` + 1 rows."""
        times = np.empty([self._rows, self._width])
        count = _times(self._name, first, times.ctypes.data_as(ctypes.POINTER(ctypes.c_double)))
        return times[:count].tolist()


def _array(numbers: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(numbers))(*numbers)


def _flat(messages: Sequence[Sequence[int]]) -> tuple[int, Any, Any]:
    sizes = [len(message) for message in messages]
    return len(sizes), _array(sizes), _array(list(itertools.chain.from_iterable(messages)))
