"""Converts the number of rounds of a Keras optimizer to a number of steps, and sets learning rates by this number."""

from __future__ import annotations

from functools import partial
from typing import Any

import keras
import numpy as np

from horovod_partial.keras.backend import backend
from horovod_partial.runtime.healing import Array


class Steps(keras.metrics.Metric):  # type: ignore[misc]
    """Converts the iterations of an optimizer, which count rounds, to steps.

    A round counts as a part of a step: its number of gradients, divided by the number of ranks. This class is a metric,
    because Keras lets metrics save their own variables. A file that lacks such variables, or has more, can be loaded.
    """

    def __init__(self) -> None:
        super().__init__(dtype="float64", name="steps")
        self._ahead = self.add_variable((), "zeros", self.dtype, name="iterations_ahead")

    def update_state(self, iterations: Any, steps: Any) -> None:
        """Count further iterations of the optimizer. Each iteration counts as `steps` steps, usually less than 1."""
        self._ahead.assign_add(keras.ops.cast(iterations, self.dtype) * (1.0 - steps))

    def result(self, iterations: Any) -> Any:
        """Convert a number of iterations of the optimizer to whole steps, in the same dtype."""
        steps = keras.ops.cast(iterations, self.dtype) - self._ahead
        # A round counts as a fraction of a step. The 1e-6 makes up for rounding errors in the sum of these fractions.
        return keras.ops.cast(keras.ops.floor(steps + 1e-6), iterations.dtype)

    def save_own_variables(self, store: Any) -> None:
        store["0"] = keras.ops.convert_to_numpy(self._ahead)

    def load_own_variables(self, store: Any) -> None:
        self._ahead.assign(store["0"] if "0" in store else 0.0)  # noqa: SIM401 (`store.get` opens another store)


def follow_steps(optimizer: Any) -> None:
    """Let Keras's schedules in an optimizer, and in optimizers within it, follow steps instead of rounds."""
    if not hasattr(optimizer, "_horovod_steps"):
        optimizer._horovod_steps = Steps()
    # Refer only to the optimizer's attributes. A reference to the optimizer would keep it and its buckets alive.
    for one in _innermost(optimizer):
        one._get_current_learning_rate = partial(_learning_rate, vars(one), optimizer._horovod_steps)


def _learning_rate(attributes: dict[str, Any], steps: Steps) -> Any:
    """Return an optimizer's learning rate from its attributes, as Keras does, but let schedules count steps."""
    rate = attributes["_learning_rate"]
    if _is_schedule(rate):
        return rate(steps.result(attributes["_iterations"]))
    return rate() if callable(rate) else rate


def has_schedule(optimizer: Any) -> bool:
    """Return whether a schedule of Keras sets the rate of an optimizer, or of an optimizer within it."""
    return any(_is_schedule(one._learning_rate) for one in _innermost(optimizer))


def _is_schedule(rate: Any) -> bool:
    return isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)


def _innermost(optimizer: Any) -> list[Any]:
    own = inner(optimizer)
    return own.optimizers if isinstance(own, keras.optimizers.MultiOptimizer) else [own]


def inner(optimizer: Any) -> Any:
    """Return the optimizer within a `LossScaleOptimizer`; otherwise the optimizer itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def steps_of(optimizer: Any) -> int:
    """Return how many steps an optimizer has applied. Only for eager code."""
    passes = optimizer.gradient_accumulation_steps or 1
    return int(optimizer._horovod_steps.result(inner(optimizer)._iterations // passes * passes))


class Rates:
    """Learning rates that callbacks set for each round of an optimizer, by the number of steps before the round."""

    def __init__(self) -> None:
        self._callbacks: list[Any] = []
        # Whether any callback sets learning rates. A graph reads this variable, and calls Python only if it is True.
        self._are_set = keras.Variable(False, dtype="bool", trainable=False)

    def add(self, callback: Any) -> None:
        """Let a callback set rates from now on. Callbacks of another `fit`, which was interrupted, no longer do so."""
        others = [one for one in self._callbacks if one is not callback and one.params is callback.params]
        self._callbacks = [*others, callback]
        self._are_set.assign(True)

    def remove(self, callback: Any) -> None:
        """Stop asking a callback for learning rates."""
        self._callbacks.remove(callback)
        self._are_set.assign(bool(self._callbacks))

    def set(self, optimizer: Any) -> None:
        """Set an optimizer's learning rate for its next round, in eager code or in a graph."""
        own = inner(optimizer)
        if isinstance(own, keras.optimizers.MultiOptimizer) or not isinstance(own._learning_rate, keras.Variable):
            return  # callbacks cannot set learning rates of a MultiOptimizer, or rates that a schedule sets
        step, rate = optimizer._horovod_steps.result(own._iterations), own._learning_rate.value

        def ask() -> None:
            numbers = backend.when_it_runs(self._ask, step, rate, dtype="float64", shape=[2])
            set_rate(optimizer, numbers[0], numbers[1])

        keras.ops.cond(self._are_set.value, ask, lambda: None)

    def _ask(self, step: Any, rate: Any) -> Array:
        before, factor = float(rate), 1.0
        for callback in self._callbacks:
            after = callback.rate_after(int(step))
            if after is None:
                continue
            factor *= callback.correction(before, after)
            before = after
        return np.array([before, factor])


def set_rate(optimizer: Any, rate: Any, factor: Any) -> None:
    """Set an optimizer's learning rate, and multiply its velocities by `factor`, because they contain the old rate."""
    optimizer.learning_rate = rate
    factor = keras.ops.cast(factor, keras.config.floatx())
    own = inner(optimizer)

    def scale() -> None:
        if getattr(own, "momentum", 0):  # SGD and RMSprop have velocities, which are sums of past gradients times rates
            for velocity in [*getattr(own, "momentums", ()), *getattr(own, "_momentums", ())]:
                velocity.assign(velocity * keras.ops.cast(factor, velocity.dtype))

    # Horovod changes `momentum` for one batch instead. A graph would not see this change of a Python attribute.
    keras.ops.cond(factor != 1.0, scale, lambda: None)
