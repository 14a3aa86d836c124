"""`hvd.DistributedOptimizer` for optimizers of Keras 3, with a sync policy."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import keras
from horovod.common.process_sets import ProcessSet, global_process_set

from horovod_partial import _attach, policies
from horovod_partial.checks import require
from horovod_partial.exchange.arguments import (
    check_gradient_arguments,
    check_kinds,
    refuse_about_gradients,
    warn_of_policy,
    with_num_groups,
)
from horovod_partial.exchange.bucket_options import BucketOptions
from horovod_partial.exchange.gradients import GradientExchange, options_of
from horovod_partial.exchange.names import InstanceNames
from horovod_partial.exchange.wrapping import subclass
from horovod_partial.keras.backend import backend
from horovod_partial.keras.models import ModelExchange
from horovod_partial.keras.replica import arrays_of, replica_of
from horovod_partial.keras.steps import Rates, follow_steps, has_schedule, inner
from horovod_partial.keras.work_sharing import WorkSharingExchange, weakly
from horovod_partial.policies import Full, LateGradients, ModelPolicy, Policy, SharedUpdates, WorkSharing
from horovod_partial.runtime import bucket_config, healing
from horovod_partial.runtime.tenure import Tenure
from horovod_partial.settings import settings

Average, Compression = backend.horovod.Average, backend.horovod.Compression

_Exchange: TypeAlias = GradientExchange | ModelExchange | WorkSharingExchange
_names = InstanceNames(backend.runtime)


class _Methods:
    """Methods of wrapped optimizers. A subclass of the class of the user's optimizer (`_base`) gets them."""

    is_horovod_partial = True
    _base: Any  # the class of the optimizer that the user has wrapped
    _horovod: _State

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        """Combine gradients over the ranks and apply them, or apply this rank's gradients and then average models."""
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)  # type: ignore[attr-defined]
        if len(grads) == 0 or len(grads) != len(variables):
            return self._base.apply(self, grads, trainable_variables)  # Keras itself handles wrong or empty arguments
        if not self.built:  # type: ignore[has-type]
            with keras.name_scope(self.name):  # type: ignore[attr-defined]
                self.build(variables)  # type: ignore[attr-defined]
            self.built = True
        known = {id(backend.native(variable)) for variable in self._trainable_variables}  # type: ignore[attr-defined]
        unknown = [variable for variable in variables if id(backend.native(variable)) not in known]
        if unknown:  # raise before this rank sends any gradient: other ranks would wait for the rest
            raise ValueError(
                f"{getattr(unknown[0], 'path', unknown[0].name)} was not trained when the optimizer was built, so it has no "
                "state there: call optimizer.flush() on every rank, then wrap a new optimizer, and compile the model with it"
            )
        return self._horovod.apply(self, list(grads), list(variables))

    # If Keras accumulates gradients, `_backend_update_step` sends them, and clips and decays once for each round.
    # Then Keras's own calls of `_clip_gradients` and `_apply_weight_decay` must do nothing.

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        return grads if self._horovod.accumulates(self) else self._base._clip_gradients(self, grads)

    def _apply_weight_decay(self, variables: Sequence[Any]) -> None:
        if not self._horovod.accumulates(self):
            self._base._apply_weight_decay(self, variables)

    def _backend_update_step(
        self, grads: Sequence[Any], trainable_variables: Sequence[Any], learning_rate: Any
    ) -> None:
        if self._horovod.accumulates(self):
            self._horovod.update(self, list(grads), list(trainable_variables))
        else:
            self._base._backend_update_step(self, grads, trainable_variables, learning_rate)

    def __setattr__(self, name: str, value: Any) -> None:
        # Keras's LossScaleOptimizer sets the attribute `loss_scale_factor` of the optimizer that it wraps.
        # A LossScaleOptimizer may not wrap a DistributedOptimizer: each rank would decide alone whether to skip a step.
        if name == "loss_scale_factor":
            raise ValueError(
                "wrap the outermost optimizer: hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer)). "
                "Where the model's dtype policy is mixed_float16, Keras wraps what it is given unless it is one already"
            )
        self._base.__setattr__(self, name, value)

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Make an optimizer from a configuration of Keras, and wrap it with the same arguments as for this class."""
        custom = {} if custom_objects is None else {"custom_objects": custom_objects}
        return DistributedOptimizer(cls._base.from_config(config, **custom), **cls._horovod_arguments)  # type: ignore[attr-defined]

    def register_local_var(self, var: Any) -> None:
        """Keep a variable's gradient on this rank, same as in Horovod's PartialDistributedOptimizer."""
        require(isinstance(backend.native(var), backend.Variable), "var", "a variable", var)
        self._horovod.local.append(var)

    @property
    def all_variables(self) -> list[Any]:
        """The optimizer's `variables`, and the variables that convert its rounds to steps (see `Steps`).

        Keras saves all these variables. If only one rank has loaded the optimizer, broadcast all of them
        (`hvd.callbacks.BroadcastGlobalVariablesCallback` does).
        """
        return [*self.variables, *self._horovod_steps.variables]  # type: ignore[attr-defined]

    @property
    def rounds(self) -> int:
        """How many rounds this rank has taken: use this number for schedules and to decide when to stop.

        What a round is depends on the policy. Under `hvd.WorkSharing()` it is an update. Under `hvd.Full()`, and under
        every other policy if there is only one rank, it is a step. Under a policy that averages models, it is an
        average. Under all other policies a round combines gradients, and counts once this rank has taken its results
        from every bucket of the optimizer. Only for eager code.
        """
        return self._horovod.rounds(self)

    def flush(self) -> None:
        """Deliver late gradients and apply missed rounds. Under a policy that averages models, make all models equal.

        This waits until every rank flushes. Call it in eager code, on every rank before an evaluation or a checkpoint,
        and at the end of training (`hvd.callbacks.FlushCallback` does). Under `hvd.Full()` it does nothing.
        """
        self._horovod.flush(self)

    def flushed(self) -> bool:
        """Return whether this rank has no late gradients and no missed rounds, or no step since its last flush.

        Under a policy that averages models: whether this rank has taken no step since its last flush. Under any other
        policy, saving the optimizer warns once if the answer is False. Only for eager code.
        """
        return self._horovod.is_flushed(self)

    def finalize_variable_values(self, var_list: Any) -> None:
        sharing = self._horovod.sharing
        if sharing is not None:  # Keras's `fit` calls this method at its end, even if training stops within an epoch
            sharing.work.give_back()
        self._base.finalize_variable_values(self, var_list)

    def get_config(self) -> dict[str, Any]:
        config: dict[str, Any] = self._base.get_config(self)
        if self._horovod.shares_work and self._horovod.averages and self._horovod.passes > 1:
            own = config["inner_optimizer"]["config"] if "inner_optimizer" in config else config
            own["gradient_accumulation_steps"] = self._horovod.passes
        return config

    def save_own_variables(self, store: Any) -> None:
        """Save the optimizer's variables. Warns once if `flushed()` is False, because ranks' models may differ then."""
        self._horovod.before_saving(self)
        self._base.save_own_variables(self, store)


class _Progress:
    """An optimizer's number of steps, now and at its last flush. This object outlives the optimizer."""

    def __init__(self, optimizer: Any) -> None:
        # `_iterations` counts backward passes. If Keras accumulates gradients, `iterations` counts only updates.
        self._iterations = inner(optimizer)._iterations
        self._flushed_at = 0

    def flushed(self) -> None:
        self._flushed_at = self._now()

    def is_flushed(self) -> bool:
        return self._flushed_at == self._now()

    def _now(self) -> int:
        with backend.outside_graphs():
            return int(keras.ops.convert_to_numpy(self._iterations))

    def follows(self, variables: Sequence[Any]) -> bool:
        """Record the variables to train. Returns False if another optimizer trained some, and was not flushed since."""
        before = [getattr(variable, "_horovod_progress", self) for variable in variables]
        for variable in variables:
            variable._horovod_progress = self
        return all(progress is self or progress.is_flushed() for progress in before)


class _State:
    """What a wrapped optimizer needs besides the user's optimizer: its exchange, its policy and its progress."""

    def __init__(
        self,
        optimizer: Any,
        name: str,
        policy: Policy,
        arguments: dict[str, Any],
        options: BucketOptions | None,
        passes: int,
        averages: bool,
    ) -> None:
        self.process_set: ProcessSet = arguments["process_set"]
        self.passes = passes  # under `WorkSharing`: the number of micro-batches per rank in an update
        self.has_data = False  # whether a step was taken with a batch of a `DynamicShardingDataset`
        self.end = math.inf  # under `WorkSharing`: no micro-batch begins after this many updates
        self._epochs = Tenure(backend.runtime)  # remembers after which `hvd.init()` `end` was set
        # Sets the learning rate of each round; None without replay and without `WorkSharing`.
        self.rates = Rates() if isinstance(policy, LateGradients | WorkSharing) else None
        self._name = name
        self._policy = policy
        self.shares_work = isinstance(policy, WorkSharing)
        self._arguments = arguments
        self._options = options  # the options of the buckets of gradients; None if there are no such buckets
        self.unscaled = options is not None and options.unscaled  # whether gradients travel without the loss scale
        self.averages = averages  # whether gradients of a step's backward passes are averaged; if not, they are summed
        self.local: list[Any] = []  # the variables whose gradients are not combined over the ranks
        self._made: _Exchange | None = None
        self._tenure = Tenure(backend.runtime)  # remembers after which `hvd.init()` the exchange was made
        self._owner: _attach.Owner | None = None  # when this object is deleted, the buckets of gradients end
        self._introduction: healing.Introduction | None = None  # compares the variables of all ranks at the start
        self.progress = _Progress(optimizer)
        self._has_warned = False
        # True until ranks have compared the models that they began with. While it is False, graphs do not call Python.
        self._may_tell = keras.Variable(False, dtype="bool", trainable=False)

    @property
    def _has_rounds(self) -> bool:
        return not isinstance(self._policy, Full) and backend.runtime.size_of(self.process_set) > 1

    def _current(self) -> _Exchange | None:
        """Return the object that exchanges gradients or models; None before the first step since `hvd.init()`."""
        return self._made if self._tenure.is_current else None

    def _in_use(self) -> _Exchange | None:
        """Return `_current()`. If a graph from before the last `hvd.init()` runs, keep using the graph's exchange."""
        made = None if self._tenure.is_current else self._made
        if isinstance(made, GradientExchange) and made.is_in_use and _names.take(made.name):
            self._tenure.enter()
            backend.runtime.family(self.process_set, made.bucket_names).own(self._owner)
            self._introduce(made.name, ())  # do not compare variables: steps since the restart have changed them here
        return self._current()

    @backend.uncompiled  # type: ignore[untyped-decorator]
    def _exchange(self, optimizer: Any, variables: Sequence[Any]) -> Any:
        """Return the object that exchanges gradients or models. `variables` are those that the step trains.

        The object is made in the first step after each `hvd.init()`, because its name depends on the variables.
        """
        if not self._tenure.is_current:
            self._made = self._new_exchange(optimizer, variables)
            self._tenure.enter()
        return self._made

    def _new_exchange(self, optimizer: Any, variables: Sequence[Any]) -> _Exchange:
        if self.shares_work and self.local:
            raise ValueError(
                f"local variables cannot be used with {self._policy!r}: each rank would train its own part"
            )
        follow_steps(optimizer)  # called again: a MultiOptimizer makes some of its optimizers only when it is built
        trained = variables if self.shares_work else optimizer._trainable_variables
        numbers = [backend.framework.number_of(variable, self.process_set) for variable in trained]
        name = _names.new(self._name, f"{self.process_set.ranks} {type(optimizer).__name__} {numbers}")
        local = {id(backend.native(variable)) for variable in self.local}
        if isinstance(self._policy, ModelPolicy):
            exchange = ModelExchange(self._policy, self._arguments, lambda one: id(backend.native(one)) in local)
            exchange.use_name(name)
            return exchange
        self._owner, self._introduction = _attach.Owner(), None
        applies_rounds = self.shares_work or self._has_rounds
        if applies_rounds and not self.progress.follows(optimizer._trainable_variables):
            warnings.warn(
                "an optimizer begins to train what another one has trained that was not flushed: what that has pending or has "
                "missed is lost, and replicas part. Call flush() of the one before on every rank, before the first step of the "
                "new one",
                stacklevel=1,
            )
        if self._has_rounds and (self.process_set.included() or not self.shares_work):
            self._introduce(name, [variable for variable in trained if id(backend.native(variable)) not in local])
        replica = replica_of(optimizer)
        if self.shares_work:
            shared = backend.SharedGradients(name, self._options, trained)
            shared.family.own(self._owner)
            return WorkSharingExchange(shared, trained, self.passes, self.end, replica)
        return GradientExchange(
            backend.framework, name, self._arguments, self._options, self.local, owner=self._owner, replica_of=replica
        )

    def _introduce(self, name: str, variables: Sequence[Any]) -> None:
        """Start a comparison of `variables` over the ranks. From now on flushes also compare the ranks' values."""
        meeting = backend.runtime.meet(self.process_set)
        start = f"{bucket_config.INTERNAL}start.{name}"
        with backend.outside_graphs():
            if meeting is not None:
                backend.runtime.family(self.process_set, [start]).own(self._owner)
                self._introduction = healing.Introduction(meeting, start, arrays_of(variables))
            self._may_tell.assign(True)

    @backend.uncompiled  # type: ignore[untyped-decorator]
    def _combine(
        self, optimizer: Any, gradients: list[Any], variables: list[Any], apply_round: Callable[..., None]
    ) -> None:
        """Combine gradients over the ranks. `apply_round` applies a round to the optimizer, its first argument."""
        reference = weakref.ref(optimizer)
        has_told = weakly(self._has_told)  # refers weakly: a graph keeps this function, but must not keep the exchange

        def apply(*arguments: Any) -> None:
            own = reference()
            if own is not None:
                apply_round(own, *arguments)

        def ask() -> None:
            backend.when_it_runs(has_told, dtype="bool")

        self._exchange(optimizer, variables).apply_combined(gradients, variables, apply)
        # Warn in one of the first steps, in eager code or in a graph, if the ranks began with different models.
        if self._has_rounds:
            keras.ops.cond(self._may_tell.value, ask, lambda: None)

    def _has_told(self) -> bool:
        introduction = None if self._current() is None else self._introduction
        is_over = introduction is None or introduction.tell(claims=False)
        self._may_tell.assign(not is_over)
        return is_over

    @property
    def sharing(self) -> WorkSharingExchange | None:
        """The exchange under `hvd.WorkSharing`; None before the first step since the last `hvd.init()`."""
        made = self._current()
        return made if isinstance(made, WorkSharingExchange) else None

    def begin_epoch(self, optimizer: Any, updates: int) -> int:
        """Begin an epoch of `updates` updates, after which no micro-batch begins. Returns `rounds` before the epoch.

        An epoch begins where the previous epoch ends. So a rank that is behind in its updates returns the same number
        as the other ranks. Raises RuntimeError if the previous epoch has updates left.
        """
        is_first = self._epochs.enter() or math.isinf(self.end)
        if not is_first and self.rounds(optimizer) < self.end:
            raise RuntimeError(
                "an epoch of another dataset was left early: finish it before this one begins, or flush and wrap a new optimizer"
            )
        first = self.rounds(optimizer) if is_first else int(self.end)
        self.end = first + updates
        if self.sharing is not None:
            self.sharing.work.end = self.end
        return first

    def apply(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> Any:
        exchange = self._exchange(optimizer, variables)
        if isinstance(exchange, ModelExchange):
            passes = inner(optimizer).gradient_accumulation_steps
            if passes and not self.averages:  # Keras averages over backward passes: multiply averages, to get sums
                # `keras.ops.multiply` also takes sparse gradients of TensorFlow.
                gradients = [None if each is None else keras.ops.multiply(each, passes) for each in gradients]
            result = optimizer._base.apply(optimizer, gradients, variables)
            if not passes:
                exchange.average(optimizer, variables)
                return result
            is_last = keras.ops.equal(inner(optimizer)._iterations % passes, 0)
            keras.ops.cond(is_last, lambda: exchange.average(optimizer, variables), lambda: None)
            return result
        if not self.shares_work and self.accumulates(optimizer):
            return optimizer._base.apply(optimizer, gradients, variables)
        if self.unscaled:  # remove the loss scale, because it may change before a late gradient is applied
            scale = optimizer.dynamic_scale
            gradients = [None if gradient is None else gradient / scale for gradient in gradients]
        self._combine(optimizer, gradients, variables, _apply_round)
        return None

    def accumulates(self, optimizer: Any) -> bool:
        """Return whether Keras accumulates the gradients of several backward passes before they travel."""
        return bool(optimizer.gradient_accumulation_steps) and not isinstance(self._policy, ModelPolicy)

    def update(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
        """Combine over the ranks the gradients that Keras has accumulated, and apply each round that has ended."""
        passes = optimizer.gradient_accumulation_steps
        if not self.averages:
            gradients = [None if gradient is None else gradient * passes for gradient in gradients]
        self._combine(optimizer, gradients, variables, _update_round)
        # `_update_round` has added the backward passes of each round to `_iterations`. Keras itself has also added 1 in
        # each pass of this step, so subtract the passes.
        optimizer._iterations.assign_sub(passes)

    def before_round(self, optimizer: Any) -> None:
        if self.rates is not None:
            self.rates.set(optimizer)

    def after_round(self, optimizer: Any, iterations: Any, steps: Any) -> None:
        if self.rates is not None:
            optimizer._horovod_steps.update_state(iterations, steps)

    def rounds(self, optimizer: Any) -> int:
        if not (self.shares_work or self._has_rounds):
            return int(optimizer.iterations)
        made = self._in_use()
        return 0 if made is None else made.rounds

    def is_flushed(self, optimizer: Any) -> bool:
        made = self._in_use()
        return made is None or self.progress.is_flushed() or made.is_settled

    def before_saving(self, optimizer: Any) -> None:
        if self._has_warned or isinstance(self._policy, ModelPolicy) or self.is_flushed(optimizer):
            return
        self._has_warned = True
        warnings.warn(
            "the optimizer was saved while this rank has late gradients pending, or results that it has missed: call "
            "optimizer.flush() on every rank before, or put hvd.callbacks.FlushCallback() before the callback that saves; or else the "
            "replicas that are saved differ",
            stacklevel=3,
        )

    def flush(self, optimizer: Any) -> None:
        made = self._in_use()
        if isinstance(made, ModelExchange):
            made.flush(made.averaged(optimizer, optimizer._trainable_variables))
        elif made is not None:
            made.flush()
        self.progress.flushed()


def _apply_round(optimizer: Any, gradients: list[Any], variables: list[Any], steps: Any) -> None:
    """Apply a round's combined gradients, for an optimizer that does not accumulate gradients.

    `steps` is the number of steps per rank, on average, whose gradients are in the round.
    """
    if optimizer._horovod.unscaled:
        scale = optimizer.dynamic_scale
        gradients = [None if gradient is None else gradient * scale for gradient in gradients]
    optimizer._horovod.before_round(optimizer)
    before = inner(optimizer)._iterations + 0
    optimizer._base.apply(optimizer, gradients, variables)
    # A LossScaleOptimizer skips a round if gradients overflow. Then `_iterations` does not grow, and no step counts.
    optimizer._horovod.after_round(optimizer, inner(optimizer)._iterations - before, steps)


def _update_round(optimizer: Any, gradients: list[Any], variables: list[Any], steps: Any) -> None:
    """Apply a round's combined gradients, for an optimizer that accumulates gradients. `steps` as in `_apply_round`.

    Keras counts backward passes in `_iterations`, so this function adds all passes of one update.
    """
    passes = optimizer.gradient_accumulation_steps
    phase = optimizer._iterations % passes
    # Keras updates variables only in a step's last backward pass. Set `_iterations` as if this pass were the last.
    optimizer._iterations.assign_add(passes - 1 - phase)
    optimizer._horovod.before_round(optimizer)
    clipped = optimizer._base._clip_gradients(optimizer, gradients)
    optimizer._base._apply_weight_decay(optimizer, variables)
    optimizer._base._backend_update_step(optimizer, clipped, variables, optimizer.learning_rate)
    for variable in variables:
        if variable.constraint is not None:
            variable.assign(variable.constraint(variable))
    optimizer._iterations.assign_add(phase + 1)
    optimizer._horovod.after_round(optimizer, passes, steps)


def _scales_loss(optimizer: Any) -> bool:
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    num_groups: int = 0,
    groups: int | list[list[Any]] | None = None,
    *,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    sync: Policy | str | None = None,
) -> Any:
    """Wrap an optimizer of Keras 3: combine gradients over the ranks before a step, or average models after the step.

    The arguments before `sync` are those of `horovod.tensorflow.keras.DistributedOptimizer`, except as described here.
    (On Keras 3 that function silently reduces nothing.) Their order is that of `horovod.keras.DistributedOptimizer`,
    which lacks some arguments. The wrapped optimizer works in `model.fit`, with `run_eagerly`, and in user loops that
    call `apply`. On TensorFlow `jit_compile=True` raises an error. Saved models contain the unwrapped optimizer:
    `hvd.load_model` wraps it again.

    Under a policy that averages models (`hvd.GroupAverage`, `hvd.PartialReduce`, `hvd.WeightedAverage`) each rank steps
    with its own gradients, then averages its model with other ranks. Arguments about gradients must have their
    defaults. Let all ranks start from the same model (`hvd.callbacks.BroadcastGlobalVariablesCallback`), and flush
    before an evaluation or a checkpoint (`hvd.callbacks.FlushCallback`).

    Under a policy with late gradients (see `hvd.Solo`) a late rank applies the rounds that it has missed, one by one.
    Then `iterations` counts rounds, and gradients are clipped once in each round. A round may contain only a part of a
    step's gradients. Learning-rate schedules count steps, not rounds.

    Args:
        optimizer: any optimizer of Keras 3. The wrapper shares the optimizer's state. Wrap the outermost optimizer; if
            the global dtype policy is `mixed_float16`, this function adds a `LossScaleOptimizer`.
        name: prefix of the names of tensors and buckets.
        device_dense, device_sparse: only for `hvd.Full()`; refused on PyTorch.
        compression: late contributions and missed results are kept compressed.
        sparse_as_dense: a partial policy, and Keras on PyTorch, needs it if gradients are sparse.
        op: a partial policy takes only `hvd.Average` and `hvd.Sum`.
        backward_passes_per_step: the gradients of this many passes are summed before they travel, by Keras's own
            `gradient_accumulation_steps`. Under `hvd.WorkSharing()` an update has this many micro-batches for each
            rank, on average.
        average_aggregated_gradients: average the gradients of these passes instead of summing them.
        groups: under a partial policy the gradients of each group travel in one bucket for each dtype.
        sync: `hvd.Full()`, `hvd.Solo()`, `hvd.Majority()`, `hvd.Quorum(...)`, `hvd.WorkSharing()`, a policy that
            averages models, or the policy's name. None takes `HOROVOD_PARTIAL_SYNC`, or `Full()` if this is not set.

    Returns:
        An instance of the optimizer's class with the methods `flush`, `flushed`, `register_local_var`, and the
        properties `rounds`, `all_variables`.

    Raises:
        ValueError: an argument is wrong, or does not suit the policy.
    """
    policy = policies.resolve(sync, settings().sync, shares_work=True)
    if getattr(optimizer, "is_horovod_partial", False):
        raise ValueError("optimizer is a DistributedOptimizer already; wrap the optimizer itself, and wrap it once")
    require(isinstance(optimizer, keras.optimizers.Optimizer), "optimizer", "one of Keras 3", optimizer)
    groups = with_num_groups(groups, num_groups)
    arguments = {
        "device_dense": device_dense,
        "device_sparse": device_sparse,
        "compression": compression,
        "sparse_as_dense": sparse_as_dense,
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "groups": groups,
        "process_set": process_set,
        "scale_local_gradients": scale_local_gradients,
    }
    repeated = {
        **arguments,
        "name": name,
        "backward_passes_per_step": backward_passes_per_step,
        "average_aggregated_gradients": average_aggregated_gradients,
        "sync": policy,
    }
    check_kinds(repeated | {"sync": None})
    if isinstance(policy, ModelPolicy):
        refuse_about_gradients(policy, arguments, Compression.none)
    else:
        passes = optimizer.gradient_accumulation_steps or backward_passes_per_step
        warn_of_policy(backend.runtime, policy, inner(optimizer), passes)
    check_gradient_arguments(arguments)
    accumulates = backward_passes_per_step > 1 or optimizer.gradient_accumulation_steps
    if isinstance(policy, LateGradients) and accumulates and inner(optimizer).use_ema:
        raise ValueError(
            f"use_ema cannot be used with gradient accumulation under {policy!r}: Keras averages after each pass, and ranks "
            "differ in those; use keras.callbacks.SwapEMAWeights without accumulation, or average the model yourself after a "
            "flush"
        )
    backend.check_devices(device_dense=device_dense, device_sparse=device_sparse)
    if keras.config.dtype_policy().name == "mixed_float16" and not _scales_loss(optimizer):
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    prefix = name or f"Distributed{type(optimizer).__name__}"
    shares = isinstance(policy, WorkSharing)
    # With `backward_passes_per_step=1` the user's optimizer may accumulate gradients. Keras then averages over passes.
    averages = average_aggregated_gradients or backward_passes_per_step == 1
    steps = inner(optimizer).gradient_accumulation_steps
    if backward_passes_per_step > 1 and steps not in (None, backward_passes_per_step):
        raise ValueError("give backward_passes_per_step or gradient_accumulation_steps, not both")
    passes = int(steps or backward_passes_per_step)  # under `WorkSharing`: micro-batches of an update for each rank
    options = None
    if isinstance(policy, ModelPolicy):
        ModelExchange(policy, arguments)  # made only to check arguments: wrong ones raise errors now, not in a step
    else:
        options = options_of(
            backend.framework,
            SharedUpdates(passes) if shares else policy,
            arguments,
            replays=True,
            unscaled=_scales_loss(optimizer),
            factor=1.0 / passes if shares and averages else 1.0,
        )
    # From here on this function changes the user's optimizer, so it has checked all arguments before.
    if shares:
        repeated["backward_passes_per_step"], repeated["average_aggregated_gradients"] = passes, averages
        inner(optimizer).gradient_accumulation_steps = None
    else:
        _accumulate(optimizer, backward_passes_per_step)
    follow_steps(optimizer)
    base = type(optimizer)
    # All wrappers of one optimizer share its `__dict__`. So each wrapper keeps its own state in the slot `_horovod`.
    wrapped: Any = object.__new__(subclass(base, _Methods, _horovod_arguments=repeated, __slots__=("_horovod",)))
    # Call `__setattr__` of `object`, because Keras's own would track `__dict__` like a variable of the optimizer.
    object.__setattr__(wrapped, "__dict__", optimizer.__dict__)
    object.__setattr__(wrapped, "_horovod", _State(optimizer, prefix, policy, arguments, options, passes, averages))
    return wrapped


def _accumulate(optimizer: Any, passes: int) -> None:
    if passes == 1:
        return
    if _scales_loss(optimizer) or isinstance(optimizer, keras.optimizers.MultiOptimizer):
        raise ValueError(
            f"a {type(optimizer).__name__} takes no backward_passes_per_step; set gradient_accumulation_steps of the "
            "optimizers within it"
        )
    if optimizer.built and not optimizer.gradient_accumulation_steps:
        raise ValueError("the optimizer is built already, without accumulators for backward_passes_per_step")
    optimizer.gradient_accumulation_steps = passes


def PartialDistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    groups: int | list[list[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    **more: Any,
) -> Any:
    """Wrap an optimizer same as `hvd.DistributedOptimizer`, but do not combine the gradients of some layers.

    This is Horovod's function of the same name. "Partial" in the name does not mean partial collectives. All arguments
    except `local_layers` are those of `hvd.DistributedOptimizer`.

    Args:
        local_layers: a built layer, or several. Their gradients stay on each rank.
        more: further arguments of `hvd.DistributedOptimizer`, such as `sync`.

    Raises:
        ValueError: `local_layers` contains something that is not a layer.
    """
    layers = [] if local_layers is None else local_layers
    layers = list(layers) if isinstance(layers, Iterable) else [layers]
    fits = all(isinstance(layer, keras.layers.Layer) for layer in layers)
    require(fits, "local_layers", "a layer of Keras, or several", local_layers)
    wrapped = DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        **more,
    )
    for layer in layers:
        for variable in layer.trainable_weights:
            wrapped.register_local_var(variable)
    return wrapped


def load_model(
    filepath: Any,
    custom_optimizers: list[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    **arguments: Any,
) -> keras.Model:
    """Load a model that was saved with `model.save`, and wrap its optimizer. The state of the optimizer is kept.

    Args:
        filepath: same as in `keras.models.load_model`.
        custom_optimizers: optimizer classes of your own.
        custom_objects: same as in `keras.models.load_model`.
        arguments: arguments for `hvd.DistributedOptimizer`, such as `compression` and `sync`.

    Raises:
        ValueError: Keras 3 cannot load the file, or an argument is wrong.
    """
    if arguments.pop("legacy_opts", False):
        raise ValueError("Keras 3 has no legacy optimizers")
    known = {cls.__name__: cls for cls in custom_optimizers or ()} | (custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=known)
    if model.optimizer is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, **arguments)
        if has_schedule(model.optimizer):
            # The wrapper has added a variable by which schedules count steps. Load this variable from the file, too.
            model.load_weights(filepath)
    return model
