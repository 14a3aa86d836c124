"""What all ranks of a training with Keras should have alike: trained variables, and the optimizer's."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

from horovod_partial.exchange.gradients import Family
from horovod_partial.healing import Array, Key, Replica


def replica_of(optimizer: Any) -> Callable[[Family, list[Any]], Replica]:
    """What makes the replica of a family of an optimizer's, of the variables that it trains."""
    reference = weakref.ref(optimizer)
    return lambda family, variables: _Replica(family, variables, reference())


class _Replica:
    """See `horovod_partial.healing.Replica`. In eager code."""

    def __init__(self, family: Family, variables: list[Any], optimizer: Any) -> None:
        self._family = family
        self._variables = variables
        # Gradients that accumulate are each rank's own.
        own = {id(variable) for variable in getattr(optimizer, "_accumulated_gradients", ())}
        self._state = [variable for variable in getattr(optimizer, "variables", ()) if id(variable) not in own]
        self.heal = family.heal

    @property
    def family(self) -> list[str]:
        return self._family.family

    @property
    def rounds(self) -> int:
        return self._family.rounds

    @property
    def lost(self) -> int:
        return self._family.lost

    def _named(self, *, parameters_only: bool = False) -> Iterator[tuple[Key, Any]]:
        for kind, variables in (("weight", self._variables), ("optimizer's variable", self._state)):
            if kind == "weight" or not parameters_only:
                for index, variable in enumerate(variables):
                    yield (kind, index, ""), variable

    def arrays(self, *, parameters_only: bool = False) -> dict[Key, Array]:
        return {key: _bytes_of(variable) for key, variable in self._named(parameters_only=parameters_only)}

    def numbers(self) -> dict[Key, Any]:
        return {key: (str(variable.dtype), tuple(variable.shape)) for key, variable in self._named()}

    def is_finite(self) -> bool:
        values = (keras.ops.convert_to_numpy(variable) for variable in self._variables)
        return all(bool(np.isfinite(np.asarray(value, np.float64)).all()) for value in values)

    def write(self, arrays: Mapping[Key, Array], numbers: Mapping[Key, Any]) -> dict[Key, float]:
        apart = {}
        for key, variable in self._named():
            mine = keras.ops.convert_to_numpy(variable)
            if np.array_equal(_bytes_of(variable), arrays[key]):
                continue
            value = arrays[key].view(mine.dtype).reshape(mine.shape)
            apart[key] = float(np.abs(value.astype(np.float64) - mine.astype(np.float64)).max(initial=0.0))
            variable.assign(value)
        return apart


def _bytes_of(variable: Any) -> Array:
    return np.ascontiguousarray(keras.ops.convert_to_numpy(variable)).reshape(-1).view(np.uint8)
