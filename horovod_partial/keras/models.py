"""Models averaged over ranks, for the policies that do that, in eager code and in graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from horovod.common.process_sets import ProcessSet

from horovod_partial.arguments import refuse_about_gradients
from horovod_partial.bucket_config import FOR_EVER
from horovod_partial.keras.backend import backend
from horovod_partial.policies import ModelPolicy, Quorum, WeightedAverage


class ModelAverager:
    """The averages of one optimizer's model: WAGMA-SGD, P-Reduce and WP-SGD, as in `horovod_partial.torch`.

    Args:
        name: prefix of the buckets' names.
        policy: what to average with whom.
        arguments: as in `GradientReducer`; those about gradients must be left alone.
        is_local: whether a variable is left alone.

    Raises:
        ValueError: an argument does not go with the policy.
    """

    def __init__(
        self,
        name: str,
        policy: ModelPolicy,
        arguments: dict[str, Any],
        is_local: Callable[[Any], bool] = lambda _: False,
    ) -> None:
        given = {
            "compression": arguments["compression"] is not backend.horovod.Compression.none,
            "op": arguments["op"] != backend.horovod.Average,
            "gradient_predivide_factor": arguments["gradient_predivide_factor"] != 1.0,
            "groups": arguments["groups"] is not None,
            "fusion": arguments["fusion"] is not None,
            "divisor": arguments["divisor"] != "ranks",
        }
        refuse_about_gradients(policy, given, max_staleness=arguments["max_staleness"], grace_ms=arguments["grace_ms"])
        if policy.overlap:
            raise ValueError("overlap=True is for horovod_partial.torch: Keras begins a step after the one before")
        if "buffers" in policy.average:
            raise ValueError(
                "an optimizer of Keras does not know the model's buffers: leave them out of average=, and use "
                "hvd.ModelSyncCallback, which averages the whole model"
            )
        self._name = f"{name}.model"
        self._policy = policy
        self._is_local = is_local
        self._process_set: ProcessSet = arguments["process_set"]
        self._max_staleness = arguments["max_staleness"]
        self._grace_ms = arguments["grace_ms"]
        self._averages: Any = None  # of WeightedAverage: a variable, as the next
        self._steps_since_average: Any = None

    @backend.uncompiled  # type: ignore[untyped-decorator]
    def average(self, optimizer: Any, variables: list[Any]) -> None:
        """The average that the policy asks for after a step, in eager code or in a graph."""
        if not self._process_set.included() or self._process_set.size() == 1:
            return
        if isinstance(self._policy, WeightedAverage):
            self._average_by_work(self._policy, optimizer, variables)
        else:
            self._average_now(optimizer, variables, 0)

    def _average_now(self, optimizer: Any, variables: list[Any], steps: Any) -> None:
        by_work = isinstance(self._policy, WeightedAverage)
        backend.average_(
            self._averaged(optimizer, variables),
            self._name,
            self._policy,
            self._process_set,
            steps=steps,
            max_staleness=FOR_EVER if by_work else self._max_staleness,
            grace_ms=self._grace_ms,
        )

    def _average_by_work(self, policy: WeightedAverage, optimizer: Any, variables: list[Any]) -> None:
        """When some rank has taken all the steps of this period, average.

        A round for each period tells: the first rank to come to its end closes it, and nobody waits. Round 0, in which
        all ranks take part, is before the first period.
        """
        with backend.outside_graphs():
            if self._averages is None:
                self._averages = keras.Variable(0, dtype="int64", trainable=False)
                self._steps_since_average = keras.Variable(0, dtype="int32", trainable=False)
        averages, taken = self._averages, self._steps_since_average
        taken.assign_add(1)

        def begin() -> Any:
            averages.assign(0)
            taken.assign(1)
            return self._end_period()

        # Fewer rounds than averages: in the first step, and after Horovod has been initialised anew.
        ended = backend.completed(self._period, self._process_set)
        ended = keras.ops.cond(ended < averages + 1, begin, lambda: ended)
        steps, over = taken + 0, averages + 2  # as they are now
        # Once more if it only told of an earlier period, to which another rank came first.
        ended = keras.ops.while_loop(
            lambda ended: keras.ops.logical_and(steps >= policy.period, ended < over),
            lambda _: self._end_period(),
            ended,
        )

        def average() -> None:
            self._average_now(optimizer, variables, steps)
            averages.assign_add(1)
            taken.assign(0)

        keras.ops.cond(ended >= over, average, lambda: None)

    @property
    def _period(self) -> str:
        return f"{self._name}.period"

    def _end_period(self) -> Any:
        """Tell that this rank is through with its period. Returns how many rounds of periods have ended."""
        return backend.signal(self._period, self._process_set)

    def _averaged(self, optimizer: Any, variables: list[Any]) -> list[Any]:
        """What the policy names, in an order that is the same on every rank: parameters, then state of their shapes."""
        averaged = [variable for variable in variables if not self._is_local(variable)]
        if "state" in self._policy.average:
            shapes = {tuple(variable.shape) for variable in averaged}
            averaged += [
                variable
                for variable in optimizer.variables
                if is_floating(variable) and len(variable.shape) and tuple(variable.shape) in shapes
            ]
        return averaged

    @property
    def rounds(self) -> int:
        """Averages that have been made. In eager code."""
        return backend.runtime.completed(self._process_set.process_set_id, self._name)

    def flush(self, optimizer: Any) -> None:
        """Average what the policy averages over all ranks, which all must come: then the models are equal."""
        if not self._process_set.included() or self._process_set.size() == 1:
            return
        process_set, name = self._process_set.process_set_id, f"{self._name}.flush"
        backend.runtime.clear(process_set, name)  # averages that were made while this rank was out of training
        backend.runtime.flush(process_set)
        averaged = self._averaged(optimizer, optimizer._trainable_variables)
        backend.average_(averaged, name, Quorum(1.0), self._process_set)


def is_floating(variable: Any) -> bool:
    """Whether a variable holds floating-point numbers."""
    return keras.backend.is_float_dtype(keras.backend.standardize_dtype(variable.dtype))
