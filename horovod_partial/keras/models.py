"""Averages a Keras optimizer's model over ranks after each step, in eager code and in graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from horovod_partial.exchange import models
from horovod_partial.keras.backend import backend
from horovod_partial.policies import ModelPolicy, WeightedAverage


class ModelExchange(models.ModelExchange):
    """Averages the model of one optimizer of Keras, under a policy that averages models.

    `arguments` are the user's arguments of `hvd.DistributedOptimizer`. Variables for which `is_local` returns True are
    not averaged. Raises ValueError if the policy has `overlap`, or averages buffers.
    """

    runtime, signal = backend.runtime, staticmethod(backend.signal)

    def __init__(
        self,
        policy: ModelPolicy,
        arguments: dict[str, Any],
        is_local: Callable[[Any], bool] = lambda _: False,
    ) -> None:
        super().__init__(policy, arguments["process_set"])
        if policy.overlap:
            raise ValueError(
                "overlap= is only for horovod_partial.torch: in Keras a step begins when the one before has ended"
            )
        if "buffers" in policy.average:
            raise ValueError(
                "an optimizer of Keras does not know the model's buffers: leave them out of average=, and use "
                "hvd.callbacks.ModelSyncCallback, which averages the whole model"
            )
        self._is_local = is_local
        self._trained: list[int] | None = None  # numbers of the variables trained in the first step; None before it

    @backend.uncompiled  # type: ignore[untyped-decorator]
    def average(self, optimizer: Any, variables: list[Any]) -> None:
        """Average the model after a step, if the policy says so, in eager code or in a graph.

        Raises ValueError if the step has trained other variables than the optimizer's first step.
        """
        if not self.is_needed:
            return
        trained = [backend.framework.number_of(variable, self.process_set) for variable in variables]
        if self._trained not in (None, trained):
            raise ValueError(
                f"an optimizer under {self.policy!r} trains other variables than in its first step, as where layers are frozen or "
                "unfrozen: call optimizer.flush(), then wrap a new optimizer for what is trained from now on"
            )
        self._trained = trained
        model = self.averaged(optimizer, variables)
        if not isinstance(self.policy, WeightedAverage):
            self._average(model, 0)
            return
        steps = backend.when_it_runs(lambda: self.steps_to_average() or 0)
        keras.ops.cond(steps > 0, lambda: self._average(model, steps), lambda: None)

    def _average(self, model: Sequence[Any], steps: Any) -> None:
        backend.average_(model, self.name, self.policy, self.process_set, steps=steps)

    @property
    def is_settled(self) -> bool:
        """Whether this rank has no other ranks to average with, so that its model needs no flush."""
        return not self.is_needed

    def _average_over_all(self, model: Sequence[Any], name: str, policy: WeightedAverage, work: int) -> Sequence[int]:
        return list(map(int, backend.average_(model, name, policy, self.process_set, steps=work).work))

    def averaged(self, optimizer: Any, variables: list[Any]) -> list[Any]:
        """Return the variables that the policy averages, in the same order on every rank.

        Parameters come first, then floating-point state that has the shape of a parameter.
        """
        averaged = [variable for variable in variables if not self._is_local(variable)]
        if "state" in self.policy.average:
            shapes = {tuple(variable.shape) for variable in averaged}
            averaged += [
                variable
                for variable in optimizer.variables
                if is_floating(variable) and len(variable.shape) and tuple(variable.shape) in shapes
            ]
        return averaged


def is_floating(variable: Any) -> bool:
    """Return whether a variable holds floating-point numbers."""
    return keras.backend.is_float_dtype(keras.backend.standardize_dtype(variable.dtype))
