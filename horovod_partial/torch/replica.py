"""What all ranks of a training should have alike: an optimizer's parameters, and all that it keeps beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from horovod_partial.exchange.healing import Array, Key

_PLAIN = (bool, int, float, complex, str, type(None))


class ReplicaState:
    """The values of one replica, by what they are: see `horovod_partial.exchange.healing.Replica`.

    Args:
        optimizer: whose parameters, state and parameter groups these are.
        names: of the parameters that belong to the replica.
        followers: what follows the optimizer's rounds: it has `load_state_dict`, and `state_dict` gives tensors and plain values.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: Mapping[torch.nn.Parameter, str], followers: Sequence[Any]
    ) -> None:
        self._optimizer = optimizer
        self._parameters = {name: parameter for parameter, name in names.items()}
        self._followers = followers

    def arrays(self, *, parameters_only: bool = False) -> dict[Key, Array]:
        """The bytes of all tensors."""
        items = self._of_parameters() if parameters_only else self._values()
        return {key: _bytes_of(value) for key, value in items if torch.is_tensor(value)}

    def numbers(self) -> dict[Key, Any]:
        """All other values; of tensors their dtypes and shapes."""
        kinds = {key: (v.dtype, tuple(v.shape)) if torch.is_tensor(v) else v for key, v in self._values()}
        return dict(sorted(kinds.items(), key=str))

    def is_finite(self) -> bool:
        """Whether no parameter has an element that is not."""
        return all(bool(torch.isfinite(parameter).all()) for parameter in self._parameters.values())

    @torch.no_grad()
    def write(self, arrays: Mapping[Key, Array], numbers: Mapping[Key, Any]) -> dict[Key, float]:
        """Let this replica have these values; returns how far tensors that differed were apart, by what they are."""
        mine = dict(self._values())
        values = {key: _tensor_of(arrays[key], *value) if key in arrays else value for key, value in numbers.items()}
        apart = {}
        for key, data in arrays.items():
            if key not in mine or not np.array_equal(_bytes_of(mine[key]), data):
                apart[key] = _distance(mine.get(key), values[key])
        for kind, name, what in mine.keys() - values.keys():
            if kind == "state":
                del self._optimizer.state[self._parameters[name]][what]
        followers: list[dict[str, Any]] = [{} for _ in self._followers]
        for (kind, name, what), value in values.items():
            if kind == "parameter":
                self._parameters[name].copy_(value)
            elif kind == "state":
                parameter = self._parameters[name]
                _put(self._optimizer.state[parameter], what, value, parameter.device)
            elif kind == "group":
                _put(self._optimizer.param_groups[name], what, value, torch.device("cpu"))
            else:
                followers[name][what] = value
        for follower, state in zip(self._followers, followers, strict=True):
            follower.load_state_dict(state)
        return apart

    def _of_parameters(self) -> Iterator[tuple[Key, Any]]:
        for name, parameter in self._parameters.items():
            yield ("parameter", name, ""), parameter

    def _values(self) -> Iterator[tuple[Key, Any]]:
        yield from self._of_parameters()
        for name, parameter in self._parameters.items():
            for what, value in self._optimizer.state.get(parameter, {}).items():
                if _is_kept(value):
                    yield ("state", name, what), value
        for index, group in enumerate(self._optimizer.param_groups):
            for what, value in group.items():
                if what != "params" and _is_kept(value):
                    yield ("group", index, what), value
        for index, follower in enumerate(self._followers):
            for what, value in follower.state_dict().items():
                if _is_kept(value):
                    yield ("follower", index, what), value


def _is_kept(value: Any) -> bool:
    """Whether a value is one of which the ranks can tell whether it is the same."""
    if isinstance(value, list | tuple):
        return all(isinstance(one, _PLAIN) for one in value)
    return torch.is_tensor(value) or isinstance(value, _PLAIN)


def _put(owner: dict[str, Any], key: str, value: Any, device: torch.device) -> None:
    """Into the tensor that is there, if there is one like it: others may hold it. PyTorch keeps single numbers on the host."""
    old = owner.get(key)
    if not torch.is_tensor(value):
        owner[key] = value
    elif torch.is_tensor(old) and old.shape == value.shape and old.dtype == value.dtype:
        old.copy_(value)
    else:
        owner[key] = value.to(device) if value.dim() > 0 else value


def _bytes_of(tensor: torch.Tensor) -> Array:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return dense.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _tensor_of(data: Array, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(data.copy()).view(dtype).reshape(shape)


def _distance(old: Any, new: torch.Tensor) -> float:
    """The largest difference of two elements; infinite where there is none to be told."""
    if not torch.is_tensor(old) or old.shape != new.shape or old.numel() == 0:
        return float("inf")
    return float((old.detach().cpu().double() - new.double()).abs().max())
