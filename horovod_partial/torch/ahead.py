"""The parameters of an optimizer that has taken rounds while the program waits, and does not expect its model to change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter


class _Ahead(NamedTuple):
    before: torch.Tensor  # what the parameter was when the first round was taken
    values: torch.Tensor  # after the rounds that were


class ParametersAhead:
    """Copies of an optimizer's parameters, to which rounds are applied between two of its steps.

    The model must stay as it is for as long as the program waits: autograd may have saved its parameters for a backward pass,
    or the program may be evaluating or saving it. The optimizer's state goes ahead with the copies, since nothing else reads
    it. Only the thread that takes the optimizer's steps uses this.
    """

    def __init__(self) -> None:
        self._ahead: dict[torch.nn.Parameter, _Ahead] = {}

    def __bool__(self) -> bool:
        return bool(self._ahead)

    @contextmanager
    def in_place_of(self, parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
        """Within this context these parameters are the copies; autograd sees no change."""
        # What is made here outlives the context in which the program waits, such as that of a validation.
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(parameters[0].device.type, enabled=False),
            _unsafe_preserve_version_counter(tuple(parameters)),
        ):
            for p in parameters:
                if p not in self._ahead:
                    self._ahead[p] = _Ahead(p.detach().clone(), p.detach().clone())
            model = [p.data for p in parameters]
            try:
                for p in parameters:
                    p.data = self._ahead[p].values
                yield
            finally:
                for p, values in zip(parameters, model, strict=True):
                    p.data = values

    @torch.no_grad()
    def become_the_model(self) -> bool:
        """Let the model have what its copies have become. False if somebody has written it since: what was added to the copies is
        added to that, which is the same up to rounding.
        """
        ahead, self._ahead = self._ahead, {}
        same = all(torch.equal(_bits(p), _bits(a.before)) for p, a in ahead.items())  # what is not a number, too
        for p, a in ahead.items():
            p.copy_(a.values if same else p + (a.values - a.before))
        return same

    def forget(self) -> None:
        """Leave the model as it is."""
        self._ahead = {}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
