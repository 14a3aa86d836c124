"""The wrapped optimizer: an instance of a subclass of the user's own class, which exchanges gradients or models."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from horovod.common.process_sets import ProcessSet
from torch.utils.hooks import RemovableHandle

from horovod_partial.checks import require_count
from horovod_partial.exchange.names import InstanceNames
from horovod_partial.exchange.rounds import RoundInfo
from horovod_partial.exchange.work_sharing import MicroBatches
from horovod_partial.exchange.wrapping import subclass
from horovod_partial.merging import MergingPlan
from horovod_partial.runtime.appliers import NO_THREAD
from horovod_partial.runtime.tenure import Tenure
from horovod_partial.torch.operations import runtime
from horovod_partial.torch.ownership import require_ownership, take_over
from horovod_partial.torch.round_steps import RoundHook, RoundSteps

_names = InstanceNames(runtime)


class Exchange:
    """Base class of what combines gradients before an optimizer's own step, or averages its model after the step.

    The wrapped optimizer is the object that `wrap` returns, and holds the exchange. Its properties `last_round` and
    `last_average` come from here. `work` says which calls of its `step` end an update. `synchronized` tells whether
    this step has waited for its results, and `synchronizes_in_step` whether `step` waits for them.
    """

    process_set: ProcessSet
    round_steps: RoundSteps
    synchronizes_in_step = True
    last_round: RoundInfo | None = None
    last_average: Any = None
    work = MicroBatches()
    thread = NO_THREAD  # the thread that took the last step
    _wrapped: weakref.ref[Any] | None = None
    _local_steps = 0  # how many steps this rank has taken
    _flushed_at = 0  # how many of these it had taken at the last flush

    @property
    def wrapped(self) -> Any:
        """The wrapped optimizer, the object that holds this one; None if it is gone."""
        return None if self._wrapped is None else self._wrapped()

    @property
    def synchronized(self) -> bool:
        return True

    @property
    def rounds(self) -> int:
        raise NotImplementedError

    @property
    def merging_plan(self) -> MergingPlan | None:
        return None

    @property
    def is_flushed(self) -> bool:
        raise NotImplementedError

    def step(self, optimizer: Any, closure: Callable[[], Any] | None) -> Any:
        """Exchange with other ranks, and call `optimizer._base.step`, the user's step. Returns the closure's loss."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Wait until the results of this step's exchange with other ranks are there."""
        raise NotImplementedError

    @property
    def is_under_way(self) -> bool:
        """Whether gradients wait for a step of the optimizer."""
        return False

    def stop_reducing(self) -> None:
        """Do not reduce the gradients of later backward passes: another wrapper does. Still deliver late contributions."""

    def flush_optimizer(self, optimizer: Any) -> None:
        """Deliver late contributions and apply missed rounds. Under a policy of models, make all models equal."""
        raise NotImplementedError

    def forget(self) -> None:
        """Before a state is loaded, forget what is late or missed. Raises AssertionError if gradients are under way."""
        raise NotImplementedError

    def set_passes(self, passes: int) -> None:
        """Set how many backward passes accumulate before a step."""

    def succeed(self, before: Exchange) -> None:
        """Take the state of an earlier exchange of the same optimizer, which had fewer parameters and was flushed."""
        self.work = self.work.after(before.work)

    def before_zero_grad(self) -> None:
        """Raise AssertionError if gradients are under way, because they may not be cleared now."""

    def before_state_dict(self) -> None:
        """Prepare for saving: wait for an average that is under way, or warn if the optimizer has not been flushed."""


class Methods(torch.optim.Optimizer):
    """Methods that `wrap` adds to a subclass of the user's optimizer class. This class itself has no instances."""

    is_horovod_partial = True
    _base: Any  # the user's optimizer class
    _exchange: Exchange
    _make_exchange: MakeExchange
    gives_way = False  # whether a later wrapper has taken over parameters of this one
    ownership: Any = None  # which parameters this wrapper owns, and whether it has been used; `ownership.py` sets it
    # A generation of Horovod, and how many rounds this optimizer took in it before the last `add_param_group`.
    _rounds_before = (0, 0)
    backward_passes_per_step: int

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the wrapped optimizer's step, after gradients have been reduced, or before models are averaged.

        Under a gradient policy this synchronizes, then applies each round that has ended since the last step, oldest
        first. If this rank was on time that is one round. A round without any gradient causes no step. `closure` is
        evaluated once, before the reduction. With `step_each_pass` only the last call in an update does this.

        Raises:
            RuntimeError: gradients were changed while they travelled, or a later wrapper has taken parameters of this one.
            ValueError: the optimizer's process set was removed.
        """
        require_ownership(self)
        self._require_process_set()
        return self._exchange.work.step(closure, partial(self._exchange.step, self))

    def synchronize(self) -> None:
        """Wait until every bucket has its result.

        Afterwards each parameter's `grad` is its part of the result or, under a policy of models, the parameters are
        their average. Gradients that backward did not make count as zeros, same as in Horovod. If this rank has missed
        rounds, `grad` is the result of the oldest one. Do not change it by hand then: the other missed rounds would not be
        changed, so `step` raises RuntimeError. Pass `max_grad_norm`, `max_grad_value` or `grad_transform` to
        `hvd.DistributedOptimizer`.

        Raises:
            RuntimeError: gradients were changed while they travelled, or a later wrapper has taken parameters of this one.
        """
        require_ownership(self)
        self._exchange.synchronize()

    def register_round_hook(self, hook: RoundHook, state: Any = None) -> RemovableHandle:
        """Call `hook(optimizer)` after each round that is applied, on every rank alike: for moving averages and projections.

        A late rank applies several rounds in one step, and calls the hook after each. Under `hvd.Full()`, and where
        models are averaged, each step counts as a round. Returns a handle; its `remove()` removes the hook. Ranks call the
        hook at different steps of their own. So a collective of Horovod's in it needs a name: Horovod numbers collectives
        without a name by their order on each rank, and would pair it with another one.

        `state` is what the hook changes, such as a moving average: a module, or anything else with `load_state_dict`
        and a `state_dict` of tensors and plain values. A flush compares it over the ranks together with the model.
        """
        return self._exchange.round_steps.register(hook, state)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Context in which `step` does not wait for gradients: for gradient clipping after `synchronize`."""
        self._exchange.synchronizes_in_step = False
        try:
            yield
        finally:
            self._exchange.synchronizes_in_step = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many backward passes accumulate before a step, same as in Horovod."""
        require_count("passes", passes, 1)
        self._exchange.work.set_passes(passes)
        self.backward_passes_per_step = passes
        self._exchange.set_passes(passes)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters, same as the user's optimizer does. With `step_each_pass` only between updates.

        Raises:
            AssertionError: gradients are under way; call it after `step` or `synchronize`.
        """
        if self._exchange.work.keeps_gradients:
            return
        self._exchange.before_zero_grad()
        self._base.zero_grad(self, set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Flush, then add a parameter group. Call it on every rank, between two steps.

        All parameters get new buckets. The names of the added parameters are their positions in the parameter groups.

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
        before, rounds, self._exchange = self._exchange, self.rounds, exchange
        exchange._wrapped = weakref.ref(self)
        exchange.succeed(before)
        exchange.set_passes(self.backward_passes_per_step)
        self._rounds_before = runtime.generation, rounds - exchange.rounds
        take_over(self, exchange.process_set)

    @property
    def process_set(self) -> ProcessSet:
        """The ranks over which this optimizer combines gradients, or averages its model."""
        return self._exchange.process_set

    @property
    def rounds(self) -> int:
        """How many rounds this rank has taken since `hvd.init`. All ranks have the same number after a flush: stop by it.

        Under `hvd.Full()`, and on a single rank, this is the number of steps. With a policy of models it is the number
        of averages.

        Raises:
            ValueError: the optimizer's process set was removed.
        """
        self._require_process_set()
        generation, before = self._rounds_before
        return self._exchange.rounds + (before if generation == runtime.generation else 0)

    def begin_micro_batch(self) -> tuple[int, int]:
        """Return the number of the open update and of this rank's micro-batch within it. Needs a step after each pass.

        An update has `backward_passes_per_step` micro-batches for each rank. The micro-batches of rank 0 have the lowest
        numbers, then come those of rank 1, and so on. A rank computes its own micro-batches first. Under
        `hvd.WorkSharing()` it then computes those of slower ranks. There `step` usually begins the next micro-batch, and
        this only returns its numbers. After a flush this may wait until there is a micro-batch for this rank.

        Raises:
            ValueError: the policy is another one than `hvd.WorkSharing()`, and the optimizer has no `step_each_pass`.
        """
        number = self._exchange.work.begin_before(math.inf)
        assert number is not None
        return self._exchange.work.rounds, number

    @property
    def ends_update(self) -> bool:
        """Whether the next call of `step` ends an update."""
        return self._exchange.work.is_last

    @property
    def updated(self) -> int:
        """How many updates were applied between the ends of the last two calls of `step`.

        Where `step` comes after each backward pass it may be 0. Under `hvd.WorkSharing()` it is more than 1 if other ranks
        made updates without this one. Otherwise it is 1.
        """
        return self._exchange.work.updated

    @property
    def steps_in_round(self) -> float:
        """Steps per rank, on average, in the newest applied round: its number of gradients over the number of ranks.

        It is 1 where each step counts as a round. After a flush the sum over all rounds is the mean number of steps
        that a rank has taken. Use it for a schedule (`hvd.follow_rounds`), or for the decay of a moving average in a
        round hook.
        """
        return self._exchange.round_steps.steps

    @property
    def merging_plan(self) -> MergingPlan | None:
        """The plan of merged gradients; None without `merging`, and before costs have been measured."""
        return self._exchange.merging_plan

    @property
    def last_round(self) -> RoundInfo | None:
        """What became of this rank's last average of models; None before the first one, and under gradient policies."""
        return self._exchange.last_round

    @property
    def last_average(self) -> Any:
        """The steps and weights of the ranks in the last average by `hvd.WeightedAverage`.

        A `WeightedAverageInfo`; None before the first average, and under other policies.
        """
        return self._exchange.last_average

    def flush(self) -> None:
        """Wait until every rank flushes, deliver late contributions, and apply what this rank has missed.

        While a rank waits it applies the rounds of other ranks. Afterwards models and optimizer states are equal bit
        for bit. Under `hvd.Full()` it does nothing. Any flush (`hvd.flush()`, `hvd.shutdown()`, the flush of another
        optimizer) does this for all optimizers of its thread.

        With a policy of models all ranks average what the policy averages (`hvd.WeightedAverage` by their work in the
        present period), so the models become equal. Call it on every rank before an evaluation or a checkpoint, and at
        the end of training. Ranks that have ended or joined need not call it. (The first flush of a policy of models
        needs all ranks that have not joined.)

        Raises:
            AssertionError: gradients are under way; call it after `step`.
            ValueError: the optimizer's process set was removed.
        """
        self._require_process_set()
        self._exchange.flush_optimizer(self)

    def flushed(self) -> bool:
        """Return whether this rank has no late contributions and no missed rounds, or no step since its last flush.

        With a policy of models: whether this rank has taken no step since its last flush. Under a partial policy
        `state_dict()` warns once if the answer is False, and the log warns at the end of the job.
        """
        return self._exchange.is_flushed

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state; warns once if `flushed` is False, because ranks may differ then."""
        self._exchange.before_state_dict()
        state: dict[str, Any] = self._base.state_dict(self)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state, and forget this rank's late contributions, missed results and kept model.

        Call this on every rank: the next round of each bucket waits for all ranks.

        Raises:
            AssertionError: gradients are under way; call it after `step`. (After a failure it may be called at any time.)
            ValueError: the optimizer's process set was removed.
        """
        self._require_process_set()
        self._exchange.forget()
        self._exchange.work.forget()
        state, groups = self.state, self.param_groups  # keep the objects that the user's optimizer and schedulers use
        self._base.load_state_dict(self, state_dict)
        state.clear()
        state.update(self.state)
        groups[:] = self.param_groups
        self.state, self.param_groups = state, groups

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the wrapper as an instance of the user's class, without hooks."""
        state = {"defaults": self.defaults, "state": self.state, "param_groups": self.param_groups}
        return self._base.__new__, (self._base,), state

    def _require_process_set(self) -> None:
        if self.process_set.process_set_id is None:
            raise ValueError(
                "the process set of this optimizer was removed, or not registered yet: wrap an optimizer with one that there is"
            )

    @property
    def _synchronized(self) -> bool:
        return self._exchange.synchronized


# The mark `hooked` keeps PyTorch from wrapping this `step`. Otherwise an optimizer's step hooks would run twice.
Methods.step.hooked = True  # type: ignore[attr-defined]


MakeExchange = Callable[[torch.optim.Optimizer], Exchange]


def wrap(
    optimizer: torch.optim.Optimizer, make_exchange: MakeExchange, backward_passes_per_step: int, **members: Any
) -> Any:
    """Return an instance of a subclass of the optimizer's class, with `members`. State and groups are shared."""
    exchange = make_exchange(optimizer)  # wrong arguments raise errors in this call, before anything has changed
    # Horovod's broadcast_optimizer_state takes steps without reducing if a wrapper's class has Horovod's module name.
    members["__module__"] = "horovod.torch.optimizer"
    instance: Any = object.__new__(subclass(type(optimizer), Methods, **members))
    vars(instance).update(own_attributes(optimizer))
    instance._exchange = exchange
    instance._make_exchange = make_exchange
    exchange._wrapped = weakref.ref(instance)
    instance.backward_passes_per_step = backward_passes_per_step
    take_over(instance, exchange.process_set)
    return instance


def own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimizer that its wrapper shares."""
    # Leave out an attribute `step` that a learning rate scheduler has set: its calls would not reach the wrapper.
    return {name: value for name, value in vars(optimizer).items() if name != "step"}


class Name:
    """The prefix of the names of an optimizer's buckets, the same on every rank.

    The name is chosen when the optimizer is wrapped, because ranks wrap in one order but may use their optimizers in
    any order (threads, or experts that a router chooses). If Horovod is not initialised at that time, the name is
    chosen at the first use. In each later generation it is chosen anew, at the first use. Optimizers with the same
    process set and `members` (names of parameters) are numbered in the order of wrapping.
    """

    def __init__(self, process_set: ProcessSet, members: Any) -> None:
        self._process_set = process_set
        self._members = members
        self._tenure = Tenure(runtime)
        if runtime.is_initialized():
            self.current()

    def current(self) -> str:
        """Return the prefix of the buckets' names in the present generation of Horovod."""
        if self._tenure.enter():
            # Name the process set by its ranks. Its number may be that of a removed process set with other ranks.
            alike = f"{self._process_set.ranks} {self._members}"
            self._name = _names.new("DistributedOptimizer", alike)
        return self._name


def with_positions(
    optimizer: torch.optim.Optimizer, names: dict[torch.nn.Parameter, str]
) -> dict[torch.nn.Parameter, str]:
    """Return the names of all parameters that an optimizer has now. Those not in `names` are named by position."""
    positions = {
        parameter: f"param_groups.{number}.{position}"
        for number, group in enumerate(optimizer.param_groups)
        for position, parameter in enumerate(group["params"])
    }
    return positions | names


def check_names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> dict[torch.nn.Parameter, str]:
    """Return each parameter's name. If `named_parameters` is None, return its position in the optimizer, as a text.

    Raises ValueError, with Horovod's messages, if an element of `named_parameters` is not a tuple, if a name occurs
    twice, or if a parameter of the optimizer has no name.
    """
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
