"""What ranks compare of a PyTorch optimizer: parameters, state, and objects that change with the optimizer's rounds."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from horovod_partial import log
from horovod_partial.runtime.healing import Array, Key

_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype)
_HOST = torch.device("cpu")


class _Tensor(NamedTuple):
    """Stands for a tensor among the plain values of a replica. The tensor's bytes travel separately, under `key`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    key: Key


class _Parts(NamedTuple):
    """Stands for a tensor that is made of other tensors, such as of quantized numbers and their scales."""

    kind: type[Any]
    context: Any  # what `__tensor_flatten__` of the class gives besides the parts
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    parts: dict[str, Any]


class _Own(NamedTuple):
    """Stands for a value of a replica that cannot be compared. Each rank keeps its own value."""


class ReplicaState:
    """The values of one replica by keys. Implements `horovod_partial.runtime.healing.Replica`.

    `followers` change with the optimizer's rounds. They have `state_dict` and `load_state_dict`.
    """

    def __init__(self, optimizer: Any, names: Mapping[torch.nn.Parameter, str], followers: Sequence[Any]) -> None:
        self.optimizer = optimizer
        self._parameters = {name: parameter for parameter, name in names.items()}
        self._followers = followers

    def parameters(self) -> dict[Key, Array]:
        """Return the contents of the replica's parameters, as bytes, without the optimizer's state."""
        return _arrays_of(self._of_parameters())

    def arrays(self) -> dict[Key, Array]:
        """Return the contents of all tensors of the replica, as bytes, also of those within lists and dictionaries."""
        return _arrays_of(self._values())

    def numbers(self) -> dict[Key, Any]:
        """Return all values of the replica. A `_Tensor` stands for a tensor, an `_Own` for what cannot be compared."""
        return {key: _taken(key, value)[0] for key, value in sorted(self._values(), key=lambda item: str(item[0]))}

    def is_finite(self) -> bool:
        return all(bool(torch.isfinite(one).all()) for one in self._parameters.values() if _is_plain(one))

    @torch.no_grad()
    def write(self, arrays: Mapping[Key, Array], numbers: Mapping[Key, Any]) -> dict[Key, float]:
        own = dict(self._values())
        followers = [dict(follower.state_dict()) for follower in self._followers]
        plan = _Plan(arrays)
        values = {
            key: plan.put(value, own.get(key), self._parameters[key[1]].device if key[0] == "state" else _HOST)
            for key, value in numbers.items()
            if not isinstance(value, _Own)
        }
        # Nothing has been written so far. So an error before this line leaves this rank's values as they are.
        for target, value in plan.copies:
            target.copy_(value)
        for kind, name, what in own.keys() - numbers.keys():
            if kind == "state":
                del self.optimizer.state[self._parameters[name]][what]
        for (kind, name, what), value in values.items():
            if kind == "state":
                self.optimizer.state[self._parameters[name]][what] = value
            elif kind == "group":
                self.optimizer.param_groups[name][what] = value
            elif kind == "follower":
                followers[name][what] = value
        for follower, state in zip(self._followers, followers, strict=True):
            follower.load_state_dict(state)
        return plan.apart

    def _of_parameters(self) -> Iterator[tuple[Key, Any]]:
        for name, parameter in self._parameters.items():
            yield ("parameter", name, ""), parameter

    def _values(self) -> Iterator[tuple[Key, Any]]:
        yield from self._of_parameters()
        for name, parameter in self._parameters.items():
            for what, value in self.optimizer.state.get(parameter, {}).items():
                yield ("state", name, what), value
        for index, group in enumerate(self.optimizer.param_groups):
            for what, value in group.items():
                if what != "params":
                    yield ("group", index, what), value
        for index, follower in enumerate(self._followers):
            for what, value in follower.state_dict().items():
                yield ("follower", index, what), value


class _Plan:
    """Gives this replica the values of another rank: collects all copies first, and writes nothing by itself."""

    def __init__(self, arrays: Mapping[Key, Array]) -> None:
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # tensors to overwrite, each with its new contents
        self.apart: dict[Key, float] = {}  # for each tensor that differs, the largest difference
        self._arrays = arrays

    def put(self, value: Any, own: Any, device: torch.device) -> Any:
        """Return what takes the place of `own`: `own` itself if it can be overwritten, as other objects may hold it."""
        if isinstance(value, _Tensor):
            return self._put_tensor(value, own, device)
        if isinstance(value, _Parts):
            return self._put_parts(value, own, device)
        if isinstance(value, dict):
            there = own if isinstance(own, Mapping) else {}
            return {each: self.put(of, there.get(each), device) for each, of in value.items()}
        if type(value) in (list, tuple):
            mine = own if isinstance(own, list | tuple) and len(own) == len(value) else [None] * len(value)
            return type(value)(self.put(of, each, device) for of, each in zip(value, mine, strict=True))
        return value

    def _put_tensor(self, value: _Tensor, own: Any, device: torch.device) -> torch.Tensor:
        data = self._arrays[value.key]
        fits = _is_plain(own) and (own.dtype, tuple(own.shape)) == (value.dtype, value.shape)
        if fits and np.array_equal(_bytes_of(own), data):
            return own
        new = torch.empty(value.shape, dtype=value.dtype, device=_HOST)
        _bytes_of(new)[:] = data
        self.apart[value.key] = _distance(own, new) if fits else float("inf")
        if fits and _can_be_overwritten(own):
            self.copies.append((own, new))
            return own
        return new.to(device) if new.dim() > 0 else new  # PyTorch keeps single numbers on the host

    def _put_parts(self, value: _Parts, own: Any, device: torch.device) -> torch.Tensor:
        fits = type(own) is value.kind and tuple(own.shape) == value.shape
        fits = fits and own.__tensor_flatten__()[1] == value.context
        mine = {each: getattr(own, each) if fits else None for each in value.parts}
        parts = {each: self.put(part, mine[each], device) for each, part in value.parts.items()}
        if fits and all(part is mine[each] for each, part in parts.items()):
            return own
        return value.kind.__tensor_unflatten__(parts, value.context, torch.Size(value.shape), value.stride)


def _bytes_of(tensor: torch.Tensor) -> Array:
    """Return the bytes of a plain tensor as uint8, in one dimension. A contiguous tensor on the host is not copied."""
    whole = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return whole.reshape(-1).view(torch.uint8).numpy()


def _is_plain(value: Any) -> bool:
    """Whether a value is a tensor that has its elements in memory, one by one, and is not made of other tensors."""
    if not torch.is_tensor(value) or hasattr(value, "__tensor_flatten__"):
        return False
    return value.layout == torch.strided and not value.is_quantized


def _arrays_of(values: Iterable[tuple[Key, Any]]) -> dict[Key, Array]:
    return {key: data for key, value in values for key, data in _taken(key, value)[1].items()}


def _taken(key: Key, value: Any) -> tuple[Any, dict[Key, Array]]:
    """Return what `_take_apart` returns, and the bytes of the tensors within; or an `_Own` if a part cannot be sent."""
    arrays: dict[Key, Array] = {}
    try:
        return _take_apart(value, key, arrays), arrays
    except Exception:  # noqa: BLE001 (a class of tensors may raise anything about what it cannot do)
        kind = " ".join([type(value).__name__, *(str(getattr(value, each, "")) for each in ("dtype", "layout"))])
        _tell_of_own(key, kind.strip())
        return _Own(), {}


def _take_apart(value: Any, key: Key, arrays: dict[Key, Array]) -> Any:
    """Return `value` with a stand-in for each tensor within it, and put the bytes of these tensors into `arrays`.

    Raises an error if there is something within that cannot be sent.
    """
    kind, name, what = key
    if isinstance(value, Mapping):
        items = sorted(value.items(), key=lambda item: str(item[0]))
        return {_plain(each): _take_apart(of, (kind, name, f"{what}.{each}"), arrays) for each, of in items}
    if type(value) in (list, tuple):
        return type(value)(_take_apart(of, (kind, name, f"{what}.{i}"), arrays) for i, of in enumerate(value))
    if _is_plain(value):
        arrays[key] = _bytes_of(value)
        return _Tensor(value.dtype, tuple(value.shape), key)
    if not hasattr(value, "__tensor_flatten__"):
        return _plain(value)
    names, context = value.__tensor_flatten__()
    pickle.dumps(type(value))  # raises an error if other ranks would not find the class
    parts = _take_apart({each: getattr(value, each) for each in names}, key, arrays)
    return _Parts(type(value), _plain(context), tuple(value.shape), value.stride(), parts)


def _plain(value: Any) -> Any:
    """Return a value unchanged. Raises TypeError unless it is of a type in `_PLAIN`, or a sequence of such values."""
    if type(value) in (list, tuple, torch.Size):
        return type(value)(map(_plain, value))
    if not isinstance(value, _PLAIN):
        raise TypeError
    return value


@functools.cache  # so that there is one warning about each value
def _tell_of_own(key: Key, kind: str) -> None:
    log.logger.warning(
        "flushes neither compare nor heal the %s, because a value like this cannot be sent: %s. Each rank keeps its own",
        " ".join(map(str, key)).strip(),
        kind,
    )


def _can_be_overwritten(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be written. Expanded tensors cannot: several of their elements share one place in memory."""
    try:
        tensor.copy_(tensor.clone())
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _distance(old: torch.Tensor, new: torch.Tensor) -> float:
    """Return the largest absolute difference between two tensors; infinite if PyTorch cannot compute it."""
    try:
        one, other = (tensor.detach().cpu().to(torch.complex128) for tensor in (old, new))
        return float((one - other).abs().max())
    except NotImplementedError:
        return float("inf")
