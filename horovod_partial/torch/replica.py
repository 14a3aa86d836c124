"""What ranks compare of a PyTorch optimizer: parameters, state, and objects that change with the optimizer's rounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from horovod_partial.runtime.healing import Array, Key

_PLAIN = (bool, int, float, complex, str, type(None))


class _Tensor(NamedTuple):
    """Stands for a tensor among the plain values of a replica. The tensor's bytes travel separately, under `key`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    key: Key


class _Own(NamedTuple):
    """Stands for a value of a replica that cannot be compared. Each rank keeps its own value."""


class ReplicaState:
    """The values of one replica by keys. Implements `horovod_partial.runtime.healing.Replica`.

    `followers` change with the optimizer's rounds. They have `state_dict` and `load_state_dict`.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: Mapping[torch.nn.Parameter, str], followers: Sequence[Any]
    ) -> None:
        self._optimizer = optimizer
        self._parameters = {name: parameter for parameter, name in names.items()}
        self._followers = followers

    def parameters(self) -> dict[Key, Array]:
        """Return the contents of the replica's parameters, as bytes, without the optimizer's state."""
        return {key: bytes_of(parameter) for key, parameter in self._of_parameters()}

    def arrays(self) -> dict[Key, Array]:
        """Return the contents of all tensors of the replica, as bytes, also of those within lists and dictionaries."""
        arrays: dict[Key, Array] = {}
        for key, value in self._values():
            _take_apart(value, key, arrays)
        return arrays

    def numbers(self) -> dict[Key, Any]:
        """Return all values of the replica. A `_Tensor` stands for each tensor, an `_Own` for what cannot be compared."""
        return {
            key: _take_apart(value, key, {}) for key, value in sorted(self._values(), key=lambda item: str(item[0]))
        }

    def is_finite(self) -> bool:
        return all(bool(torch.isfinite(parameter).all()) for parameter in self._parameters.values())

    @torch.no_grad()
    def write(self, arrays: Mapping[Key, Array], numbers: Mapping[Key, Any]) -> dict[Key, float]:
        mine = self.arrays()
        apart = {
            key: _distance(mine.get(key), data, numbers, key)
            for key, data in arrays.items()
            if key not in mine or not np.array_equal(mine[key], data)
        }
        own = dict(self._values())
        values = {key: _put_together(value, arrays, own.get(key)) for key, value in numbers.items()}
        followers = [dict(follower.state_dict()) for follower in self._followers]
        for kind, name, what in own.keys() - values.keys():
            if kind == "state":
                del self._optimizer.state[self._parameters[name]][what]
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
                yield ("state", name, what), value
        for index, group in enumerate(self._optimizer.param_groups):
            for what, value in group.items():
                if what != "params":
                    yield ("group", index, what), value
        for index, follower in enumerate(self._followers):
            for what, value in follower.state_dict().items():
                yield ("follower", index, what), value


def bytes_of(tensor: torch.Tensor) -> Array:
    """Return the bytes of a tensor as uint8, in one dimension. Makes no copy of a contiguous tensor on the host."""
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return dense.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _take_apart(value: Any, key: Key, arrays: dict[Key, Array]) -> Any:
    """Return `value` with a `_Tensor` for each tensor within it, and put the bytes of these tensors into `arrays`."""
    kind, name, what = key
    if torch.is_tensor(value):
        arrays[key] = bytes_of(value)
        return _Tensor(value.dtype, tuple(value.shape), key)
    if isinstance(value, Mapping):
        items = sorted(value.items(), key=lambda item: str(item[0]))
        return {each: _take_apart(of, (kind, name, f"{what}.{each}"), arrays) for each, of in items}
    if type(value) in (list, tuple):
        return type(value)(_take_apart(of, (kind, name, f"{what}.{i}"), arrays) for i, of in enumerate(value))
    return value if isinstance(value, _PLAIN) else _Own()


def _put_together(value: Any, arrays: Mapping[Key, Array], own: Any) -> Any:
    if isinstance(value, _Tensor):
        return torch.from_numpy(arrays[value.key].copy()).view(value.dtype).reshape(value.shape)
    if isinstance(value, _Own):
        return own
    if isinstance(value, dict):
        there = own if isinstance(own, Mapping) else {}
        return {each: _put_together(of, arrays, there.get(each)) for each, of in value.items()}
    if type(value) in (list, tuple):
        mine = own if isinstance(own, list | tuple) and len(own) == len(value) else [None] * len(value)
        return type(value)(_put_together(of, arrays, each) for of, each in zip(value, mine, strict=True))
    return value


def _put(owner: dict[str, Any], key: str, value: Any, device: torch.device) -> None:
    """Set `owner[key]`. A tensor of the same shape and dtype is overwritten, because other objects may hold it.

    A new tensor goes to `device`, but a single number stays on the host, where PyTorch keeps such numbers.
    """
    old = owner.get(key)
    if not torch.is_tensor(value) or value is old:
        owner[key] = value
    elif torch.is_tensor(old) and old.shape == value.shape and old.dtype == value.dtype:
        old.copy_(value)
    else:
        owner[key] = value.to(device) if value.dim() > 0 else value


def _distance(old: Array | None, new: Array, numbers: Mapping[Key, Any], key: Key) -> float:
    """Return the largest absolute difference between two tensors; infinite if they cannot be compared."""
    kind = numbers.get(key)
    if not isinstance(kind, _Tensor) or old is None or old.size != new.size or new.size == 0:
        return float("inf")
    one, other = (torch.from_numpy(array.copy()).view(kind.dtype).to(torch.complex128) for array in (old, new))
    return float((one - other).abs().max())
