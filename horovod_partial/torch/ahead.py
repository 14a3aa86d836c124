"""The parameters of an optimizer that has taken rounds while the program waits, and does not expect its model to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter


class _Ahead(NamedTuple):
    values: torch.Tensor  # after the rounds that were taken
    version: int  # of the parameter, when they were begun
    address: int


class ParametersAhead:
    """Copies of an optimizer's parameters, to which rounds are applied between two of its steps.

    The model must stay as it is for as long as the program waits: autograd may have saved its parameters for a backward pass,
    or the program may be evaluating or saving it. The optimizer's state goes ahead with the copies, as nothing else reads it.
    Only the thread that takes the optimizer's steps uses this.
    """

    def __init__(self) -> None:
        self._ahead: dict[torch.nn.Parameter, _Ahead] = {}

    def __bool__(self) -> bool:
        return bool(self._ahead)

    @contextmanager
    def in_place_of_the_model(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Within this context the optimizer's parameters are the copies, for autograd too, which sees no change."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        # What is made here outlives the context in which the program waits, such as that of a validation.
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(parameters[0].device.type, enabled=False),
            _unsafe_preserve_version_counter(tuple(parameters)),
        ):
            for p in parameters:
                if p not in self._ahead:
                    self._ahead[p] = _Ahead(p.detach().clone(), p._version, p.data_ptr())
            model = [p.data for p in parameters]
            try:
                for p in parameters:
                    p.data = self._ahead[p].values
                yield
            finally:
                for p, values in zip(parameters, model, strict=True):
                    p.data = values

    def become_the_model(self) -> bool:
        """Let the model have what its copies have become. False if somebody has written the parameters since: those stay."""
        ahead, self._ahead = self._ahead, {}
        if any(p._version != a.version or p.data_ptr() != a.address for p, a in ahead.items()):
            return False
        with torch.no_grad():
            for p, a in ahead.items():
                p.copy_(a.values)
        return True

    def forget(self) -> None:
        """Leave the model as it is."""
        self._ahead = {}
