"""Models averaged over ranks, for the policies that do that, in graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from horovod.common.process_sets import ProcessSet
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.mpi_ops import Average

from horovod_partial import bucket_config
from horovod_partial.arguments import refuse_about_gradients
from horovod_partial.policies import ModelPolicy, Quorum, Solo, WeightedAverage
from horovod_partial.tensorflow import operations
from horovod_partial.tensorflow.graph import arrive, completed, native, runtime

_FOR_EVER = 2**31 - 1  # rounds: no bound on staleness


class ModelAverager:
    """The averages of one optimizer's model: WAGMA-SGD, P-Reduce and WP-SGD, as in `horovod_partial.torch`.

    A rank's copy travels, so what is being sent is never what the optimizer writes; half precision travels as float32.

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
            "compression": arguments["compression"] is not Compression.none,
            "op": arguments["op"] != Average,
            "gradient_predivide_factor": arguments["gradient_predivide_factor"] != 1.0,
            "groups": arguments["groups"] is not None,
            "divisor": arguments["divisor"] != "ranks",
        }
        refuse_about_gradients(policy, given, max_staleness=arguments["max_staleness"], grace_ms=arguments["grace_ms"])
        if policy.overlap:
            raise ValueError("overlap=True is for PyTorch: a graph of TensorFlow begins a step after the one before")
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
        self._averages: tf.Variable | None = None  # of WeightedAverage, as the next
        self._steps_since_average: tf.Variable | None = None

    def average(self, optimizer: Any, variables: list[Any]) -> None:
        """The average that the policy asks for after a step, in eager code or in a graph."""
        if not self._process_set.included() or self._process_set.size() == 1:
            return
        if isinstance(self._policy, WeightedAverage):
            self._average_by_work(self._policy, optimizer, variables)
        else:
            self._average_now(optimizer, variables, 0)

    def _average_now(self, optimizer: Any, variables: list[Any], steps: tf.Tensor | int) -> None:
        averaged = self._averaged(optimizer, variables)
        by_work = isinstance(self._policy, WeightedAverage)
        results, info = operations.average(
            _widened(averaged),
            self._name,
            self._policy,
            self._process_set,
            steps=steps,
            max_staleness=_FOR_EVER if by_work else self._max_staleness,
            grace_ms=self._grace_ms,
            return_info=True,
        )
        if by_work:  # a late one is of others' models, made without this rank
            own = [tf.cast(variable, result.dtype) for variable, result in zip(averaged, results, strict=True)]
            results = [tf.where(info.late == 1, *pair) for pair in zip(own, results, strict=True)]
        _assign(averaged, results)

    def _average_by_work(self, policy: WeightedAverage, optimizer: Any, variables: list[Any]) -> None:
        """When some rank has taken all the steps of this period, average.

        A round for each period tells: the first rank to come to its end closes it, and nobody waits. Round 0, in which
        all ranks take part, is before the first period.
        """
        with tf.init_scope():
            if self._averages is None:
                self._averages = tf.Variable(0, dtype=tf.int64, trainable=False)
                self._steps_since_average = tf.Variable(0, dtype=tf.int32, trainable=False)
        averages, taken = self._averages, self._steps_since_average
        assert taken is not None
        taken.assign_add(1)

        def begin() -> tf.Tensor:
            averages.assign(0)
            taken.assign(1)
            return self._end_period()

        # Fewer rounds than averages: in the first step, and after Horovod has been initialised anew.
        ended = completed(self._period, self._process_set)
        ended = tf.cond(ended < averages + 1, begin, lambda: ended)
        steps = taken.read_value()
        over = averages.read_value() + 2
        # Once more if it only told of an earlier period, to which another rank came first.
        (ended,) = tf.while_loop(
            lambda ended: tf.logical_and(steps >= policy.period, ended < over),
            lambda _: (self._end_period(),),
            (ended,),
        )

        def average() -> tf.Tensor:
            self._average_now(optimizer, variables, steps)
            averages.assign_add(1)
            taken.assign(0)
            return tf.constant(True)

        tf.cond(ended >= over, average, lambda: tf.constant(False))

    @property
    def _period(self) -> str:
        return f"{self._name}.period"

    def _end_period(self) -> tf.Tensor:
        """Tell that this rank is through with its period. Returns how many rounds of periods have ended."""
        config = bucket_config.arguments(
            sync=Solo(),
            size=self._process_set.size(),
            average=True,
            max_staleness=_FOR_EVER,
            grace_ms=0.0,
            missed="latest",
            late="discard",
        )
        results, _ = arrive([tf.zeros([1])], self._period, self._process_set, *config)
        with tf.control_dependencies(results):
            return completed(self._period, self._process_set)

    def _averaged(self, optimizer: Any, variables: list[Any]) -> list[tf.Variable]:
        """What the policy names, in an order that is the same on every rank: parameters, then state of their shapes."""
        averaged = [native(variable) for variable in variables if not self._is_local(variable)]
        if "state" in self._policy.average:
            shapes = {tuple(variable.shape) for variable in averaged}
            state = [native(variable) for variable in optimizer.variables]
            averaged += [v for v in state if v.dtype.is_floating and v.shape.rank and tuple(v.shape) in shapes]
        return averaged

    @property
    def rounds(self) -> int:
        """Averages that have been made. In eager code."""
        return runtime.completed(self._process_set.process_set_id, self._name)

    def flush(self, optimizer: Any) -> None:
        """Average what the policy averages over all ranks, which all must come: then the models are equal."""
        if not self._process_set.included() or self._process_set.size() == 1:
            return
        process_set, name = self._process_set.process_set_id, f"{self._name}.flush"
        runtime.clear(process_set, name)  # averages that were made while this rank was out of training
        runtime.flush(process_set)
        averaged = self._averaged(optimizer, optimizer._trainable_variables)
        results = operations.average(_widened(averaged), name, Quorum(1.0), self._process_set)
        _assign(averaged, results)


def _widened(variables: list[tf.Variable]) -> list[tf.Tensor]:
    """Copies in one type: float32, in which an average of half precision is exact enough, or float64 if one is."""
    wide = tf.float64 if any(variable.dtype == tf.float64 for variable in variables) else tf.float32
    return [tf.cast(variable, wide) for variable in variables]


def _assign(variables: list[tf.Variable], values: list[tf.Tensor]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(tf.cast(value, variable.dtype))
