"""`hvd.DistributedOptimizer` for optimizers of Keras 3, with a sync policy."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

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
from horovod_partial.exchange.gradients import Apply, GradientExchange
from horovod_partial.exchange.names import InstanceNames
from horovod_partial.exchange.wrapping import subclass
from horovod_partial.keras.backend import backend
from horovod_partial.keras.models import ModelExchange
from horovod_partial.keras.replica import arrays_of, replica_of
from horovod_partial.keras.steps import Rates, follow_steps, inner
from horovod_partial.keras.work_sharing import WorkSharingExchange, weakly
from horovod_partial.policies import Full, LateGradients, ModelPolicy, Policy, SharedUpdates, WorkSharing
from horovod_partial.runtime.tenure import Tenure
from horovod_partial.settings import settings

Average, Compression = backend.horovod.Average, backend.horovod.Compression

_names = InstanceNames(backend.runtime)


class _Methods:
    """Methods of wrapped optimizers: they are added to a subclass of the user's optimizer class (`_base`)."""

    is_horovod_partial = True
    _base: Any  # the class of the optimizer that the user has wrapped
    _horovod: _State

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        """Call the user's optimizer's `apply`. Combine gradients over the ranks before it, or average models after it."""
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)  # type: ignore[attr-defined]
        if len(grads) == 0 or len(grads) != len(variables):
            return self._base.apply(self, grads, trainable_variables)  # Keras itself handles wrong or empty arguments
        if not self.built:  # type: ignore[has-type]
            with keras.name_scope(self.name):  # type: ignore[attr-defined]
                self.build(variables)  # type: ignore[attr-defined]
            self.built = True
        known = {id(backend.native(variable)) for variable in self._trainable_variables}  # type: ignore[attr-defined]
        unknown = [variable for variable in variables if id(backend.native(variable)) not in known]
        if unknown:  # raise the error before this rank sends a gradient, so that no other rank waits for more of them
            raise ValueError(
                f"{getattr(unknown[0], 'path', unknown[0].name)} was not trained when the optimizer was built, so it has no "
                "state there: call optimizer.flush() on every rank, then wrap a new optimizer, and compile the model with it"
            )
        return self._horovod.apply(self, list(grads), list(variables))

    # `_backend_update_step` sends gradients that Keras has accumulated, and clips and decays once for each round.
    # So if Keras accumulates gradients, its own calls of `_clip_gradients` and `_apply_weight_decay` do nothing.

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
        """Make an optimizer from a configuration of Keras, and wrap it with the same arguments as this optimizer."""
        custom = {} if custom_objects is None else {"custom_objects": custom_objects}
        return DistributedOptimizer(cls._base.from_config(config, **custom), **cls._horovod_arguments)  # type: ignore[attr-defined]

    def register_local_var(self, var: Any) -> None:
        """Keep a variable's gradient on this rank, same as in Horovod's PartialDistributedOptimizer."""
        require(isinstance(backend.native(var), backend.Variable), "var", "a variable", var)
        self._horovod.register_local(var)

    @property
    def all_variables(self) -> list[Any]:
        """The optimizer's `variables`, and those that convert its rounds to steps (see `Steps`). Keras saves both.

        If only one rank has loaded the optimizer, broadcast all of them
        (`hvd.callbacks.BroadcastGlobalVariablesCallback` does).
        """
        return [*self.variables, *self._horovod_steps.variables]  # type: ignore[attr-defined]

    @property
    def rounds(self) -> int:
        """How many rounds have ended in all buckets: use it for schedules and to decide when to stop.

        Only for eager code.

        Under `hvd.Full()`, and on a single rank, this is the number of steps. With a policy of models it is the number
        of averages.
        """
        return self._horovod.rounds(self)

    def flush(self) -> None:
        """Deliver late contributions and apply missed rounds. Under a policy of models, make the models equal.

        This waits until every rank flushes. Call it in eager code, on every rank before an evaluation or a checkpoint,
        and at the end of training (`hvd.callbacks.FlushCallback` does). Under `hvd.Full()` it does nothing.
        """
        self._horovod.flush(self)

    def flushed(self) -> bool:
        """Return whether this rank has no late contributions and no missed rounds, or no step since its last flush.

        With a policy of models: whether this rank has taken no step since its last flush. If the answer is False, saving
        the model with its optimizer warns once (not with a policy of models). Call this in eager code.
        """
        return self._horovod.is_flushed(self)

    def finalize_variable_values(self, var_list: Any) -> None:
        self._horovod.leave()  # Keras's `fit` calls this method at its end, even if training stops within an epoch
        self._base.finalize_variable_values(self, var_list)

    def get_config(self) -> dict[str, Any]:
        config: dict[str, Any] = self._base.get_config(self)
        if self._horovod.shares_work and self._horovod.averages and self._horovod.passes > 1:
            own = config["inner_optimizer"]["config"] if "inner_optimizer" in config else config
            own["gradient_accumulation_steps"] = self._horovod.passes
        return config

    def save_own_variables(self, store: Any) -> None:
        """Save the optimizer's variables. Warns once if `flushed()` is False, because replicas may differ then."""
        self._horovod.before_saving(self)
        self._base.save_own_variables(self, store)


class _Progress:
    """An optimizer's number of steps, now and at its last flush. This object outlives the optimizer."""

    def __init__(self, iterations: Any) -> None:
        self._iterations = iterations
        self._flushed_at = 0

    def flushed(self) -> None:
        self._flushed_at = self._now()

    def is_flushed(self) -> bool:
        return self._flushed_at == self._now()

    def _now(self) -> int:
        with backend.outside_graphs():
            return int(keras.ops.convert_to_numpy(self._iterations))

    def follows(self, variables: Sequence[Any]) -> bool:
        """Note the trained variables. Returns False if an earlier optimizer trained one, and was not flushed since."""
        before = [getattr(variable, "_horovod_progress", self) for variable in variables]
        for variable in variables:
            variable._horovod_progress = self
        return all(progress is self or progress.is_flushed() for progress in before)


class _State:
    """What a wrapped optimizer needs besides the user's optimizer: its exchange, its policy and its progress."""

    def __init__(
        self, name: str, policy: Policy, arguments: dict[str, Any], passes: int, averages: bool, rates: Rates | None
    ) -> None:
        self.process_set: ProcessSet = arguments["process_set"]
        self.passes = passes  # under `WorkSharing`: the number of micro-batches per rank in an update
        self.end = math.inf  # under `WorkSharing`: no micro-batch begins after this many updates
        self._epochs = Tenure(backend.runtime)  # the generation of Horovod in which `end`, a count of updates, was set
        self.rates = rates  # sets the learning rate of each round; None without replay and without `WorkSharing`
        self._name = name
        self._policy = policy
        self._arguments = arguments
        self.averages = averages  # whether gradients of a step's backward passes are averaged; if not, they are summed
        self._local: list[Any] = []
        self._made: GradientExchange | ModelExchange | WorkSharingExchange | None = None
        self._tenure = Tenure(backend.runtime)  # the generation of Horovod in which the exchange was made
        self._progress: _Progress | None = None  # counts of steps, now and at the last flush; None before first use
        self._has_warned = False
        # Whether a warning that the ranks began with different models may come. A graph calls Python only if it is True.
        self._may_tell = keras.Variable(False, dtype="bool", trainable=False)

    @property
    def _has_rounds(self) -> bool:
        return not isinstance(self._policy, Full) and backend.runtime.size_of(self._arguments["process_set"]) > 1

    def _progress_of(self, optimizer: Any) -> _Progress:
        if self._progress is None:
            # `_iterations` counts backward passes. If Keras accumulates gradients, `iterations` counts only updates.
            self._progress = _Progress(inner(optimizer)._iterations)
        return self._progress

    def register_local(self, variable: Any) -> None:
        self._local.append(variable)
        if isinstance(self._made, GradientExchange):
            self._made.register_local(variable)

    def _current(self) -> GradientExchange | ModelExchange | WorkSharingExchange | None:
        """Return the object that exchanges gradients or models; None before the first step of this generation."""
        return self._made if self._tenure.is_current else None

    def _in_use(self, optimizer: Any) -> GradientExchange | ModelExchange | WorkSharingExchange | None:
        """Return `_current()`. If a graph of an earlier generation still runs, its exchange belongs to this one from now on."""
        made = None if self._tenure.is_current else self._made
        if isinstance(made, GradientExchange) and made.is_in_use and _names.take(made.name):
            self._tenure.enter()
            made.enter_generation(self._local)
            self._introduce(made, ())  # this rank has taken steps since the restart, so its variables are other ones
        return self._current()

    @backend.uncompiled  # type: ignore[untyped-decorator]
    def _exchange(self, optimizer: Any) -> GradientExchange | ModelExchange:
        """Return the object that exchanges gradients or models.

        It is made in the first step of a generation, because its name depends on the variables.
        """
        made = self._current()
        assert not isinstance(made, WorkSharingExchange)
        if made is None:
            follow_steps(optimizer)  # called again: a MultiOptimizer makes some of its optimizers only when it is built
            process_set = self._arguments["process_set"]
            trained = [backend.number_of(variable, process_set) for variable in optimizer._trainable_variables]
            name = _names.new(self._name, f"{process_set.ranks} {type(optimizer).__name__} {trained}")
            if isinstance(self._policy, ModelPolicy):
                local = {backend.number_of(variable, process_set) for variable in self._local}
                made = ModelExchange(
                    self._policy, self._arguments, lambda variable: backend.number_of(variable, process_set) in local
                )
                made.use_name(name)
            else:
                exchange: GradientExchange = backend.GradientExchange(
                    name,
                    self._policy,
                    self._arguments,
                    replays=True,
                    skips_nonfinite=_scales_loss(optimizer),
                    owner=_attach.Owner(),
                    replica_of=replica_of(optimizer),
                )
                for variable in self._local:
                    exchange.register_local(variable)
                if self._has_rounds:
                    self._introduce(exchange, optimizer._trainable_variables)
                    self._follow(optimizer)
                made = exchange
            self._made = made
            self._tenure.enter()
        return made

    def _introduce(self, exchange: GradientExchange, variables: Sequence[Any]) -> None:
        trained = [variable for variable in variables if not exchange.is_local(variable)]
        with backend.outside_graphs():
            exchange.introduce(arrays_of(trained))
            self._may_tell.assign(True)

    @backend.uncompiled  # type: ignore[untyped-decorator]
    def _tell(self) -> None:
        """Warn in one of the first steps, in eager code or in a graph, if the ranks began with different models."""
        has_told = weakly(self._has_told)  # refers weakly: a graph keeps this function, but must not keep the exchange

        def ask() -> None:
            backend.when_it_runs(has_told, dtype="bool")

        if self._has_rounds:
            keras.ops.cond(self._may_tell.value, ask, lambda: None)

    def _has_told(self) -> bool:
        made = self._current()
        is_over = not isinstance(made, GradientExchange) or made.tell()
        self._may_tell.assign(not is_over)
        return is_over

    def _follow(self, optimizer: Any) -> None:
        if not self._progress_of(optimizer).follows(optimizer._trainable_variables):
            warnings.warn(
                "an optimizer begins to train what another one has trained that was not flushed: what that has pending or has "
                "missed is lost, and replicas part. Call flush() of the one before on every rank, before the first step of the "
                "new one",
                stacklevel=2,
            )

    @property
    def shares_work(self) -> bool:
        return isinstance(self._policy, WorkSharing)

    @property
    def sharing(self) -> WorkSharingExchange | None:
        """The exchange under `hvd.WorkSharing`; None before the first step of this generation."""
        made = self._current()
        return made if isinstance(made, WorkSharingExchange) else None

    def begin_epoch(self, optimizer: Any, updates: int) -> int:
        """Begin an epoch: no micro-batch begins after `updates` more updates. Returns `rounds` before its first update.

        Epochs follow each other without a gap. A rank that is behind in its updates gets the same number as the others.
        Raises RuntimeError if the epoch before has updates left.
        """
        is_first = self._epochs.enter() or math.isinf(self.end)
        if not is_first and self.rounds(optimizer) < self.end:
            raise RuntimeError(
                "an epoch of another dataset was left early: finish it before this one begins, or flush and wrap a new optimizer"
            )
        first = self.rounds(optimizer) if is_first else int(self.end)
        self.end = first + updates
        if self.sharing is not None:
            self.sharing.end = self.end
        return first

    @backend.uncompiled  # type: ignore[untyped-decorator]
    def _share(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
        exchange = self.sharing
        scales = _scales_loss(optimizer)
        if exchange is None:
            if self._local:
                raise ValueError(
                    f"local variables cannot be used with {self._policy!r}: each rank would train its own part"
                )
            trained = [backend.number_of(variable, self.process_set) for variable in variables]
            shared = backend.SharedGradients(
                _names.new(self._name, f"{self.process_set.ranks} {type(optimizer).__name__} {trained}"),
                SharedUpdates(self.passes, grants=False),
                self._arguments,
                replays=True,
                skips_nonfinite=scales,
                owner=_attach.Owner(),
                factor=1.0 / self.passes if self.averages else 1.0,
            )
            follow_steps(optimizer)  # called again: a MultiOptimizer makes some of its optimizers only when it is built
            self._follow(optimizer)
            if self._has_rounds and self.process_set.included():
                self._introduce(shared, variables)
            self._made = exchange = WorkSharingExchange(
                shared, variables, self.passes, _applying(optimizer, scales), replica_of(optimizer)
            )
            exchange.end = self.end
            self._tenure.enter()
        if scales:
            scale = optimizer.dynamic_scale
            gradients = [None if gradient is None else gradient / scale for gradient in gradients]
        exchange.share(gradients, variables)

    def apply(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> Any:
        if self.shares_work:
            self._share(optimizer, gradients, variables)
            return None
        exchange = self._exchange(optimizer)
        if isinstance(exchange, ModelExchange):
            passes = inner(optimizer).gradient_accumulation_steps
            if passes and not self.averages:  # Keras averages over backward passes: multiply averages, to get sums
                gradients = [None if gradient is None else gradient * passes for gradient in gradients]
            result = optimizer._base.apply(optimizer, gradients, variables)
            if not passes:
                exchange.average(optimizer, variables)
                return result
            stepped = optimizer.inner_optimizer._iterations if _scales_loss(optimizer) else optimizer._iterations
            keras.ops.cond(
                keras.ops.equal(stepped % passes, 0), lambda: exchange.average(optimizer, variables), lambda: None
            )
            return result
        if optimizer.gradient_accumulation_steps:
            return optimizer._base.apply(optimizer, gradients, variables)
        if exchange.unscaled:  # remove the loss scale, because it may change before a late gradient is applied
            scale = optimizer.dynamic_scale
            gradients = [None if gradient is None else gradient / scale for gradient in gradients]
        exchange.apply_combined(gradients, variables, _applying(optimizer, exchange.unscaled))
        self._tell()
        return None

    def accumulates(self, optimizer: Any) -> bool:
        """Return whether Keras accumulates the gradients of several backward passes, and only the result travels."""
        return bool(optimizer.gradient_accumulation_steps) and not isinstance(self._policy, ModelPolicy)

    def update(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
        """Combine over the ranks the gradients that Keras has accumulated, and apply each round that has ended."""
        exchange = self._exchange(optimizer)
        assert isinstance(exchange, GradientExchange)
        passes = optimizer.gradient_accumulation_steps
        if not self.averages:
            gradients = [None if gradient is None else gradient * passes for gradient in gradients]
        exchange.apply_combined(gradients, variables, _updating(optimizer))
        self._tell()
        # In each round `apply_combined` adds a step's backward passes to `_iterations`. Subtract those that Keras adds.
        optimizer._iterations.assign_sub(passes)

    def end_epoch(self, optimizer: Any) -> None:
        """Note that all updates of an epoch have been applied, so that another optimizer may train the model."""
        self._progress_of(optimizer).flushed()

    def leave(self) -> None:
        """At the end of `fit`, let other ranks make the micro-batch that this rank has begun."""
        if self.sharing is not None:
            self.sharing.give_back()

    def before_round(self, optimizer: Any) -> None:
        if self.rates is not None:
            self.rates.set(optimizer)

    def after_round(self, optimizer: Any, iterations: Any, steps: Any) -> None:
        if self.rates is not None:
            optimizer._horovod_steps.update_state(iterations, steps)

    def rounds(self, optimizer: Any) -> int:
        if self.shares_work:
            return 0 if self.sharing is None else self.sharing.rounds
        if not self._has_rounds:
            return int(optimizer.iterations)
        made = self._in_use(optimizer)
        return made.rounds if made is not None else 0

    def is_flushed(self, optimizer: Any) -> bool:
        made = self._in_use(optimizer)
        if made is None or self._progress_of(optimizer).is_flushed():
            return True
        if isinstance(made, WorkSharingExchange):
            return True  # under `WorkSharing` a rank's model between two steps is always that of its newest update
        return made.is_settled if isinstance(made, GradientExchange) else not made.is_needed

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
        self._flush(optimizer)
        self._progress_of(optimizer).flushed()

    def _flush(self, optimizer: Any) -> None:
        made = self._in_use(optimizer)
        if made is None:
            return
        if isinstance(made, ModelExchange):
            made.flush_optimizer(optimizer)
            return
        made.flush()


def _applying(optimizer: Any, unscaled: bool) -> Apply:
    """Return the function that applies a round's combined gradients, for an optimizer that does not accumulate gradients.

    `unscaled` says that the gradients have been divided by the loss scale.
    """
    reference = weakref.ref(optimizer)

    def apply(gradients: list[Any], variables: list[Any], steps: Any) -> None:
        own: Any = reference()
        if own is None:
            return
        if unscaled:
            scale = own.dynamic_scale
            gradients = [None if gradient is None else gradient * scale for gradient in gradients]
        own._horovod.before_round(own)
        before = inner(own)._iterations + 0
        own._base.apply(own, gradients, variables)
        # A LossScaleOptimizer skips a round if gradients overflow. Then `_iterations` does not grow: count no step.
        own._horovod.after_round(own, inner(own)._iterations - before, steps)

    return apply


def _updating(optimizer: Any) -> Apply:
    """Return the function that applies a round's combined gradients, for an optimizer that accumulates gradients.

    Keras counts backward passes in `_iterations`, so a round counts as all passes of one update.
    """
    reference = weakref.ref(optimizer)

    def apply(gradients: list[Any], variables: list[Any], steps: Any) -> None:
        own: Any = reference()
        if own is None:
            return
        passes = own.gradient_accumulation_steps
        phase = own._iterations % passes
        # Keras updates variables only in a step's last backward pass. Set `_iterations` as if this were the last one.
        own._iterations.assign_add(passes - 1 - phase)
        own._horovod.before_round(own)
        clipped = own._base._clip_gradients(own, gradients)
        own._base._apply_weight_decay(own, variables)
        own._base._backend_update_step(own, clipped, variables, own.learning_rate)
        for variable in variables:
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable))
        own._iterations.assign_add(phase + 1)
        own._horovod.after_round(own, passes, steps)

    return apply


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
    """Wrap an optimizer of Keras 3: gradients are combined over the ranks before a step, or models are averaged after it.

    The arguments before `sync` are those of `horovod.tensorflow.keras.DistributedOptimizer` (which silently reduces
    nothing on Keras 3), in the order of `horovod.keras.DistributedOptimizer`, which has fewer. The wrapped optimizer
    works in `model.fit`, with `run_eagerly`, and in your own loops that call `apply`. On TensorFlow `jit_compile=True`
    raises an error. Saved models contain the unwrapped optimizer: `hvd.load_model` wraps it again.

    With a model policy (`hvd.GroupAverage`, `hvd.PartialReduce`, `hvd.WeightedAverage`) each rank steps with its own
    gradients, then averages its model with others; arguments about gradients do not apply. Let all ranks start from the
    same model (`hvd.BroadcastGlobalVariablesCallback`), and flush before an evaluation or a checkpoint
    (`hvd.callbacks.FlushCallback`).

    If a late rank replays the rounds that it missed (see `hvd.Solo`), `iterations` counts rounds, each round is clipped,
    and a schedule follows the steps that rounds count for.

    Args:
        optimizer: any optimizer of Keras 3. The wrapper shares its state. Wrap the outermost optimizer; if the global
            dtype policy is `mixed_float16`, a `LossScaleOptimizer` is added for you.
        name: prefix of the names of tensors and buckets.
        device_dense: same as in Horovod, only under `hvd.Full()`; refused on PyTorch.
        device_sparse: same as in Horovod, only under `hvd.Full()`; refused on PyTorch.
        compression: same as in Horovod. Late contributions and missed results are kept compressed.
        sparse_as_dense: same as in Horovod; a partial policy, and Keras on PyTorch, needs it if gradients are sparse.
        gradient_predivide_factor: same as in Horovod.
        op: same as in Horovod; a partial policy takes only `hvd.Average` and `hvd.Sum`.
        backward_passes_per_step: same as in Horovod: the gradients of this many passes are summed before they travel,
            by Keras's own `gradient_accumulation_steps`.
        average_aggregated_gradients: same as in Horovod: average the gradients of these passes instead of summing them.
        num_groups: same as in Horovod (deprecated there).
        groups: same as in Horovod; under a partial policy each group is a bucket.
        process_set: same as in Horovod.
        scale_local_gradients: same as in Horovod.
        sync: `hvd.Full()`, `hvd.Solo()`, `hvd.Majority()`, `hvd.Quorum(...)`, a model policy, or the
            policy's name; None takes `HOROVOD_PARTIAL_SYNC`, and without it `Full()`.

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
        refuse_about_gradients(policy, arguments, uncompressed=Compression.none, average=Average)
    else:
        passes = optimizer.gradient_accumulation_steps or backward_passes_per_step
        warn_of_policy(backend.runtime, policy, inner(optimizer), passes)
    check_gradient_arguments(arguments)
    accumulates = backward_passes_per_step > 1 or optimizer.gradient_accumulation_steps
    replays = isinstance(policy, LateGradients)
    if replays and accumulates and inner(optimizer).use_ema:
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
    if isinstance(policy, ModelPolicy):
        ModelExchange(policy, arguments)  # made only to check arguments: wrong ones raise errors now, not in a step
    else:
        backend.GradientExchange(prefix, SharedUpdates(1, grants=False) if shares else policy, arguments, replays=True)
    passes = _passes_of(optimizer, backward_passes_per_step) if shares else backward_passes_per_step
    if shares:
        repeated["backward_passes_per_step"] = passes
        repeated["average_aggregated_gradients"] = average_aggregated_gradients or backward_passes_per_step == 1
    else:
        _accumulate(optimizer, backward_passes_per_step)  # this changes the user's optimizer, so check arguments before
    follow_steps(optimizer)
    base = type(optimizer)
    # All wrappers of one optimizer share its `__dict__`. So each wrapper keeps its own state in the slot `_horovod`.
    wrapped: Any = object.__new__(subclass(base, _Methods, _horovod_arguments=repeated, __slots__=("_horovod",)))
    # Call `__setattr__` of `object`, because Keras's own would track `__dict__` like a variable of the optimizer.
    object.__setattr__(wrapped, "__dict__", optimizer.__dict__)
    # With `backward_passes_per_step=1` Keras itself may accumulate gradients, and it averages over backward passes.
    averages = average_aggregated_gradients or backward_passes_per_step == 1
    rates = Rates() if replays or shares else None
    object.__setattr__(wrapped, "_horovod", _State(prefix, policy, arguments, passes, averages, rates))
    return wrapped


def _passes_of(optimizer: Any, passes: int) -> int:
    """Return how many micro-batches an update has for each rank. Turns off Keras's accumulation of gradients."""
    accumulating = inner(optimizer)
    steps = accumulating.gradient_accumulation_steps
    if passes > 1 and steps not in (None, passes):
        raise ValueError("give backward_passes_per_step or gradient_accumulation_steps, not both")
    accumulating.gradient_accumulation_steps = None
    return int(steps or passes)


def _accumulate(optimizer: Any, passes: int) -> None:
    if passes == 1:
        return
    if _scales_loss(optimizer) or isinstance(optimizer, keras.optimizers.MultiOptimizer):
        raise ValueError(
            f"a {type(optimizer).__name__} takes no backward_passes_per_step; set gradient_accumulation_steps of the "
            "optimizers within it"
        )
    if optimizer.gradient_accumulation_steps not in (None, passes):
        raise ValueError("give backward_passes_per_step or gradient_accumulation_steps, not both")
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
    """Wrap an optimizer same as `hvd.DistributedOptimizer`, but leave the gradients of some layers on each rank.

    This is Horovod's function of the same name. It has nothing to do with partial collectives. All arguments except
    `local_layers` are those of `hvd.DistributedOptimizer`.

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
