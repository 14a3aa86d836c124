"""The device that PyTorch's tensors lie on, which works behind the host's back."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


def finish() -> None:
    """Wait until the device has done what this rank has asked for. A CPU has."""
    if torch.get_default_device().type == "cuda":
        torch.cuda.synchronize()


class Moment(NamedTuple):
    """A time on the host by `time.perf_counter`, and the same on the device; None if that is unknown."""

    host: float
    device: Any = None


class Span(NamedTuple):
    part: str
    begin: Moment
    end: Moment


class Clock:
    """Notes in `spans` when functions begin and end: on the device by events on the thread's current stream, and on a CPU by
    the clock of the host.

    Args:
        on_device: parts that queue work on the device; of others only the times on the host are known.
    """

    def __init__(self, on_device: tuple[str, ...]) -> None:
        self.spans: list[Span] = []
        self._on_device = on_device
        self._has_events = torch.get_default_device().type == "cuda"  # autograd's threads have another default device

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose calls are noted."""

        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            begin = self._now(part)
            result = function(*arguments, **options)
            self.spans.append(Span(part, begin, self._now(part)))
            return result

        return call

    def _now(self, part: str) -> Moment:
        host = time.perf_counter()
        if part not in self._on_device or not self._has_events:
            return Moment(host, host if part in self._on_device else None)
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return Moment(host, event)


def milliseconds(begin: Any, end: Any) -> float:
    """Between two times of the host or of the device, which must be known."""
    return begin.elapsed_time(end) if isinstance(begin, torch.cuda.Event) else 1e3 * (end - begin)
