"""Copies of an optimizer's parameters: rounds are applied to them while the model must not change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from horovod_partial.torch.devices import keep_for_stream


class _Ahead(NamedTuple):
    before: torch.Tensor  # the parameter's value before rounds were applied to a copy of it
    values: torch.Tensor  # the copy of the parameter, to which rounds are applied


class ParametersAhead:
    """Copies of an optimizer's parameters, to which rounds are applied between two of its steps.

    The model must not change while the program waits: autograd may have saved its parameters for a backward pass, or
    the program may be evaluating or saving it. The optimizer's state changes at once, because nothing else reads it.
    Only the thread that takes the optimizer's steps uses this object. The model lacks `rounds` of the copies' rounds.
    """

    def __init__(self) -> None:
        self.rounds = 0
        self._ahead: dict[torch.nn.Parameter, _Ahead] = {}

    @contextmanager
    def in_place_of(self, parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
        """Context in which the parameters have the values of their copies. Autograd sees no change."""
        # A program may wait in inference mode, no_grad or autocast. Leave the mode: copies of parameters outlive waits.
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
    def become_the_model(self) -> int:
        """Copy the parameters' copies to the model, and drop them.

        If the program has changed the model meanwhile, the change of each copy is added to the program's values, and
        the result depends on rounding. Returns how many rounds the copies contained in this case, otherwise 0.
        """
        ahead, rounds = self._ahead, self.rounds
        self.forget()
        # Compare the parameters' bits, because NaN never equals itself.
        same = all(torch.equal(_bits(p), _bits(a.before)) for p, a in ahead.items())
        for p, a in ahead.items():
            p.copy_(a.values if same else p + (a.values - a.before))
            keep_for_stream(a.values)
            keep_for_stream(a.before)
        return 0 if same else rounds

    def forget(self) -> None:
        """Drop the copies of the parameters, and leave the model unchanged."""
        self._ahead = {}
        self.rounds = 0


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
