"""The replica of a Keras training: the values that ranks compare in flushes and in `hvd.assert_replicas_equal`."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import numpy as np

from horovod_partial.checks import require
from horovod_partial.exchange import replicas
from horovod_partial.keras.backend import backend
from horovod_partial.runtime.healing import Array, Key, Replica


def replica_of(optimizer: Any) -> Callable[[list[Any]], Replica | None]:
    """Return a function that makes the replica that ranks compare: trained variables, and the optimizer's state.

    The function takes the variables that the optimizer trains, and returns None if the optimizer no longer exists.
    """
    reference = weakref.ref(optimizer)
    return lambda variables: None if (own := reference()) is None else ReplicaOfVariables(variables, own)


def arrays_of(variables: Iterable[Any]) -> dict[Key, Array]:
    """Return the contents of variables as bytes. Only for eager code."""
    return {("weight", index, ""): _bytes_of(variable) for index, variable in enumerate(variables)}


def variables_of(optimizer: Any) -> list[Any]:
    """Return all variables of an optimizer, wrapped or not; an empty list for None."""
    return getattr(optimizer, "all_variables", None) or getattr(optimizer, "variables", [])


class ReplicaOfVariables:
    """The values of a training that ranks compare after a flush, a `runtime.healing.Replica`. Only for eager code."""

    def __init__(self, variables: list[Any], optimizer: Any) -> None:
        self._optimizer = optimizer  # this reference keeps the optimizer, and so its buckets, alive while ranks compare
        # Each rank has its own accumulated gradients. All other variables of the optimizer must be equal, unless each rank
        # trains local variables of its own. Keras does not tell which state belongs to those, so compare no state then.
        own = {id(variable) for variable in getattr(optimizer, "_accumulated_gradients", ())}
        registered = getattr(getattr(optimizer, "_horovod", None), "local", ())
        local = {id(backend.native(variable)) for variable in registered}
        state = [] if local else [variable for variable in variables_of(optimizer) if id(variable) not in own]
        weights = [variable for variable in variables if id(backend.native(variable)) not in local]
        everything = {"weight": weights, "optimizer's variable": state}
        # Keras numbers all layers of a process, so paths of variables may differ between ranks. Remove the numbers.
        self._named: dict[Key, Any] = {
            (kind, index, re.sub(r"_\d+", "", variable.path)): variable
            for kind, of_kind in everything.items()
            for index, variable in enumerate(of_kind)
        }

    def arrays(self) -> dict[Key, Array]:
        return {key: _bytes_of(variable) for key, variable in self._named.items()}

    def numbers(self) -> dict[Key, Any]:
        return {key: (str(variable.dtype), tuple(variable.shape)) for key, variable in self._named.items()}

    def is_finite(self) -> bool:
        values = (keras.ops.convert_to_numpy(of) for (kind, *_), of in self._named.items() if kind == "weight")
        return all(bool(np.isfinite(np.asarray(value, np.float64)).all()) for value in values)

    def write(self, arrays: Mapping[Key, Array], numbers: Mapping[Key, Any]) -> dict[Key, float]:
        apart, values = {}, {}
        for key, variable in self._named.items():
            mine = keras.ops.convert_to_numpy(variable)
            if np.array_equal(_bytes_of(variable), arrays[key]):
                continue
            value = values[key] = arrays[key].view(mine.dtype).reshape(mine.shape)
            apart[key] = float(np.abs(value.astype(np.float64) - mine.astype(np.float64)).max(initial=0.0))
        for key, value in values.items():  # assign only after all values were read, so that an error changes nothing
            self._named[key].assign(value)
        return apart


def _bytes_of(variable: Any) -> Array:
    return np.ascontiguousarray(keras.ops.convert_to_numpy(variable)).reshape(-1).view(np.uint8)


def assert_replicas_equal(model: keras.Model, optimizer: Any = None) -> None:
    """Compare trainable weights, and the optimizer's variables, over all ranks, bit for bit; every rank must call this.

    The comparison costs a hash of each variable and one small collective. Call `optimizer.flush()` before. Weights that
    are not trainable, such as the moving averages of BatchNorm, local layers, and accumulated gradients are not compared,
    because each rank has its own. With local layers no other variable of the optimizer is compared. Only for eager code.

    Args:
        model: the model whose trainable weights are compared.
        optimizer: the optimizer whose variables are compared; None compares none.

    Raises:
        ValueError: an argument is wrong.
        AssertionError: replicas differ. Every rank raises it, and the message names the first variable that
            differs, and the ranks where it differs.
    """
    require(isinstance(model, keras.Model), "model", "a keras.Model", model)
    fits = optimizer is None or isinstance(optimizer, keras.optimizers.Optimizer)
    require(fits, "optimizer", "one of Keras 3", optimizer)
    replica = ReplicaOfVariables(model.trainable_weights, optimizer)
    replicas.check_equal(replica, backend.runtime, backend.horovod.global_process_set)
