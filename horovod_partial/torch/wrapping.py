"""The wrapped optimizer: an instance of a subclass of the user's own class, which exchanges gradients or models."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from horovod.common.process_sets import ProcessSet
from torch.utils.hooks import RemovableHandle

from horovod_partial.checks import require_count
from horovod_partial.exchange.names import InstanceNames
from horovod_partial.exchange.rounds import RoundInfo
from horovod_partial.fusion import FusionPlan
from horovod_partial.runtime import Tenure
from horovod_partial.torch.operations import runtime
from horovod_partial.torch.ownership import require_ownership, take_over
from horovod_partial.torch.round_steps import RoundHook, RoundSteps

_names = InstanceNames(runtime)


class Exchange:
    """What a wrapped optimizer exchanges with other ranks: gradients before its own step, or its model after it.

    Attributes:
        process_set: the ranks that take part.
        synchronized: the results of this step are there already.
        synchronizes_in_step: `step` waits for them.
        last_round: as in the wrapped optimizer.
        last_average: as in the wrapped optimizer.
        updated: as in the wrapped optimizer.
        round_steps: what is done with the result of each round.
        wrapped: the wrapped optimizer; None when that is gone.
    """

    process_set: ProcessSet
    round_steps: RoundSteps
    wrapped: weakref.ref[Any]
    synchronized = True
    synchronizes_in_step = True
    last_round: RoundInfo | None = None
    last_average: Any = None
    updated = 1

    @property
    def rounds(self) -> int:
        raise NotImplementedError

    def begin(self) -> tuple[int, int]:
        """See `begin_micro_batch` of the wrapped optimizer."""
        raise ValueError("begin_micro_batch() is for sync=hvd.WorkSharing(): under other policies no work is shared")

    @property
    def fusion_plan(self) -> FusionPlan | None:
        return None

    @property
    def is_flushed(self) -> bool:
        raise NotImplementedError

    def step(self, optimizer: Any, closure: Callable[[], Any] | None) -> Any:
        """The optimizer's own step, `optimizer._base.step`, and the exchange; returns the closure's result."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Wait for what is under way."""
        raise NotImplementedError

    @property
    def is_under_way(self) -> bool:
        """Whether gradients are there that have not been applied."""
        return False

    def stop_reducing(self) -> None:
        """Leave the gradients of later backward passes to another wrapper."""

    def flush_optimizer(self, optimizer: Any) -> None:
        """Deliver what is pending, and apply what this rank has missed; or make all models equal."""
        raise NotImplementedError

    def forget(self) -> None:
        """Forget what is pending or missed; raise AssertionError while gradients are under way."""
        raise NotImplementedError

    def set_passes(self, passes: int) -> None:
        """So many backward passes accumulate before a step."""

    def succeed(self, before: Exchange) -> None:
        """Go on where the exchange of fewer parameters has ended, after a flush."""

    def before_zero_grad(self) -> None:
        """Raise AssertionError while gradients are under way."""

    def before_state_dict(self) -> None:
        """Let parameters and state be those after the last step."""

    def state_dict(self) -> dict[str, Any]:
        """What is saved beside the state of the user's optimizer."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict` has added to that of the user's optimizer, if it is there."""


class _Methods(torch.optim.Optimizer):
    """Methods that `wrap` adds to a subclass of the user's optimizer class, which is `_base`. Not instantiated itself."""

    is_horovod_partial = True
    _base: Any
    _exchange: Exchange
    _make_exchange: MakeExchange
    gives_way = False  # to a later wrapper of the same parameters
    _rounds_before = (0, 0)  # a generation of Horovod, and the rounds of earlier exchanges in it
    backward_passes_per_step: int

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The wrapped optimizer's step, after gradients have been combined over the ranks, or before models are averaged.

        With gradients this synchronizes, and applies each round that has ended since the last step, oldest first: one, if
        this rank was on time. A round without any gradient is no step. `closure` is evaluated once, before the reduction.

        Raises:
            RuntimeError: gradients were changed while they travelled, or a later wrapper has taken parameters of this one.
        """
        require_ownership(self)
        return self._exchange.step(self, closure)

    def synchronize(self) -> None:
        """Wait until every bucket has its result; the parameters' `grad` hold it then, or the parameters their average.

        Gradients that backward did not make count as zeros, as in Horovod. Of several rounds that this rank has missed the
        oldest is there. If it is changed by hand then, `step` raises RuntimeError, because the others would not be: pass
        `max_grad_norm`, `max_grad_value` or `grad_transform` to `hvd.DistributedOptimizer`.

        Raises:
            RuntimeError: as `step`.
        """
        require_ownership(self)
        self._exchange.synchronize()

    def register_round_hook(self, hook: RoundHook, state: Any = None) -> RemovableHandle:
        """Call `hook(optimizer)` after each round that is applied, on every rank alike: for moving averages and projections.

        A rank that was late applies several rounds in one step. Under `hvd.Full()`, and where models are averaged, each step
        counts as a round. Returns a handle whose `remove()` takes the hook away.

        `state` is what the hook moves, such as a moving average: a module, or anything else with `load_state_dict` and a
        `state_dict` of tensors and plain values. A flush compares it as it compares the model.
        """
        return self._exchange.round_steps.register(hook, state)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within this context `step` does not wait for gradients: for gradient clipping after `synchronize`."""
        self._exchange.synchronizes_in_step = False
        try:
            yield
        finally:
            self._exchange.synchronizes_in_step = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """As Horovod's: how many backward passes accumulate before a step."""
        require_count("passes", passes, 1)
        self.backward_passes_per_step = passes
        self._exchange.set_passes(passes)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer's.

        Raises:
            AssertionError: gradients are under way; call it after `step` or `synchronize`.
        """
        self._exchange.before_zero_grad()
        self._base.zero_grad(self, set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the wrapped optimizer's, on every rank, between two steps: it flushes first.

        From then on all parameters travel together, in new buckets; the new ones are named by their positions.

        Raises:
            AssertionError: gradients are under way; call it after `step`.
            ValueError: the group does not fit.
        """
        self._exchange.flush_optimizer(self)
        self._base.add_param_group(self, param_group)
        try:
            exchange = self._make_exchange(self)
        except BaseException:
            self.param_groups.pop()
            raise
        self._rounds_before = runtime.generation, self.rounds
        exchange.succeed(self._exchange)
        self._exchange = exchange
        exchange.wrapped = weakref.ref(self)
        exchange.set_passes(self.backward_passes_per_step)
        take_over(self, exchange.process_set)

    def is_under_way(self) -> bool:
        """Whether gradients are there that have not been applied."""
        return self._exchange.is_under_way

    def stop_reducing(self) -> None:
        """Leave the gradients of later backward passes to another wrapper; what is pending is still delivered."""
        self._exchange.stop_reducing()

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that take part."""
        return self._exchange.process_set

    @property
    def rounds(self) -> int:
        """Rounds whose results this rank has taken: the clock that the ranks share, for stopping; equal after a flush.

        Under `hvd.Full()`, and on one rank alone, the steps taken; with a policy of models the averages that have been made.
        """
        generation, before = self._rounds_before
        return self._exchange.rounds + (before if generation == runtime.generation else 0)

    def begin_micro_batch(self) -> tuple[int, int]:
        """Under `hvd.WorkSharing()`: the number of the open update, and that of this rank's next micro-batch within it.

        Of as many micro-batches for each rank those of rank 0 come first, then those of rank 1; a rank makes its own, and then
        those of slower ranks. `step` begins the next micro-batch before it returns, so that this only tells which one it is.
        After a flush it may have to wait until there is one for this rank.

        Raises:
            ValueError: the policy is another one.
        """
        return self._exchange.begin()

    @property
    def updated(self) -> int:
        """Updates that have been applied since the `step` before the last, under `hvd.WorkSharing()`: none, one, or more; else 1.

        More than one where other ranks have made updates without this one.
        """
        return self._exchange.updated

    @property
    def steps_in_round(self) -> float:
        """Steps of a rank, on average, that the newest applied round brought: its gradients over the number of ranks.

        1 where each step counts as a round. They add up to the steps that a rank has taken, on average, when all is flushed:
        what a schedule follows (`hvd.follow_rounds`), or the decay of a moving average in a round hook.
        """
        return self._exchange.round_steps.steps

    @property
    def fusion_plan(self) -> FusionPlan | None:
        """Which gradients travel together, and why; None without `fusion`, and before it has been measured."""
        return self._exchange.fusion_plan

    @property
    def last_round(self) -> RoundInfo | None:
        """What became of the last average of models; None before it, and with gradients."""
        return self._exchange.last_round

    @property
    def last_average(self) -> Any:
        """What the last average by `hvd.WeightedAverage` was made of; None before it, and under other policies.

        It has `steps` and `weights`, by rank, and whether the average is `useful` and `converges`.
        """
        return self._exchange.last_average

    def flush(self) -> None:
        """Wait until every rank flushes, deliver everything pending, and apply what this rank has missed.

        A rank that waits goes on applying rounds that others make. Afterwards models and optimizer states are equal bit for
        bit. Under `hvd.Full()` it does nothing. Any flush (`hvd.flush()`, `hvd.shutdown()`, that of another optimizer) does so
        for all optimizers of its thread.

        With a policy of models all ranks average what the policy averages (`hvd.WeightedAverage` by their work in the present
        period), so that the models are equal. Call it on every rank before an evaluation or a checkpoint, and at the end of
        training; ranks that have ended or joined need not come. (To the first flush of a policy of models all come but those
        that have joined.)

        Raises:
            AssertionError: gradients are under way; call it after `step`.
        """
        self._exchange.flush_optimizer(self)

    def flushed(self) -> bool:
        """Whether this rank has nothing pending and has missed nothing, or has not stepped since it was flushed.

        With a policy of models: whether it has not stepped since. `state_dict()` warns once where this is false under a partial
        policy, and so does the log at the end of the job.
        """
        return self._exchange.is_flushed

    def state_dict(self) -> dict[str, Any]:
        """As the wrapped optimizer's; warns once where this rank's model is not that of the others: see `flushed`."""
        self._exchange.before_state_dict()
        return {**self._base.state_dict(self), **self._exchange.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the wrapped optimizer's; what this rank has pending, has missed, or lets stand in for it is forgotten.

        The next round of each bucket is of all ranks.

        Raises:
            AssertionError: gradients are under way; call it after `step`. (After a failure it may be called at any time.)
        """
        self._exchange.forget()
        state, groups = self.state, self.param_groups  # which the user's optimizer and its schedulers share
        self._base.load_state_dict(self, state_dict)
        state.clear()
        state.update(self.state)
        groups[:] = self.param_groups
        self.state, self.param_groups = state, groups
        self._exchange.load_state_dict(state_dict)

    def __reduce__(self) -> tuple[Any, ...]:
        return unwrapped(self, self._base)

    @property
    def _synchronized(self) -> bool:
        return self._exchange.synchronized


# PyTorch wraps the step of every class that has not this mark, and would run the step's hooks twice.
_Methods.step.hooked = True  # type: ignore[attr-defined]


MakeExchange = Callable[[torch.optim.Optimizer], Exchange]


def wrap(
    optimizer: torch.optim.Optimizer, make_exchange: MakeExchange, backward_passes_per_step: int, **members: Any
) -> Any:
    """An instance of a subclass of the optimizer's class, with `members`, that shares its state and parameter groups."""
    exchange = make_exchange(optimizer)  # which refuses what does not fit
    base = type(optimizer)
    # Horovod's broadcast_optimizer_state knows a wrapper, whose step would reduce, by this module's name.
    body = {**vars(_Methods), "__module__": "horovod.torch.optimizer", "_base": base, **members}
    instance: Any = object.__new__(type(base.__name__, (base,), body))
    # A scheduler that was made before has put its own `step` on the instance, and would go on calling the bare one.
    instance.__dict__.update({k: v for k, v in vars(optimizer).items() if k != "step"})
    instance._exchange = exchange
    instance._make_exchange = make_exchange
    exchange.wrapped = weakref.ref(instance)
    instance.backward_passes_per_step = backward_passes_per_step
    take_over(instance, exchange.process_set)
    return instance


class Name:
    """What the names of an optimizer's buckets begin with.

    It is taken when the optimizer is wrapped: threads, and experts that a router chooses, use theirs in any order. Where
    Horovod is not up then, and in each later generation of it, it is taken when first used, as ranks that are new in that
    generation wrap anew.

    Args:
        process_set: the ranks that take part.
        members: what is exchanged; optimizers with the same process set and members are alike.
    """

    def __init__(self, process_set: ProcessSet, members: Any) -> None:
        self._process_set = process_set
        self._members = members
        self._tenure = Tenure(runtime)
        if runtime.is_initialized():
            self.current()

    def current(self) -> str:
        """The name in the present generation of Horovod."""
        if self._tenure.enter():
            # By its ranks: the number of a process set that was removed is given to a new one of other ranks.
            alike = f"{self._process_set.ranks} {self._members}"
            self._name = _names.new("DistributedOptimizer", alike)
        return self._name


def unwrapped(optimizer: torch.optim.Optimizer, base: type) -> tuple[Any, ...]:
    """For `__reduce__`: the optimizer as an instance of its own class; hooks and handles do not travel."""
    state = {"defaults": optimizer.defaults, "state": optimizer.state, "param_groups": optimizer.param_groups}
    return base.__new__, (base,), state


def with_positions(
    optimizer: torch.optim.Optimizer, names: dict[torch.nn.Parameter, str]
) -> dict[torch.nn.Parameter, str]:
    """The names of all parameters that the optimizer has now; of those that were added later, by position."""
    positions = {
        parameter: f"param_groups.{number}.{position}"
        for number, group in enumerate(optimizer.param_groups)
        for position, parameter in enumerate(group["params"])
    }
    return positions | names


def check_names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> dict[torch.nn.Parameter, str]:
    """Horovod's checks of `named_parameters`, with its messages. Returns the names, which may be positions."""
    if named_parameters is None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return {parameter: str(index) for index, parameter in enumerate(parameters)}
    named = list(named_parameters)
    if any(not isinstance(pair, tuple) for pair in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by model.named_parameters()."
        )
    names = [name for name, _ in named]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(duplicates)}"
        )
    known = {id(parameter) for _, parameter in named}
    unnamed = [id(p) for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. Python object ids: "
            f"{', '.join(map(str, unnamed))}"
        )
    return {parameter: name for name, parameter in named}
