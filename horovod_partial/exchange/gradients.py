"""Combines the gradients of a step over the ranks: what TensorFlow's tapes and all optimizers of Keras share."""

from __future__ import annotations

import hashlib
import itertools
import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from horovod.common.process_sets import ProcessSet

from horovod_partial import _attach
from horovod_partial.exchange.arguments import check_predivide
from horovod_partial.exchange.bucket_options import BucketOptions
from horovod_partial.policies import Full, LateGradients, Policy, SharedUpdates
from horovod_partial.runtime import bucket_config, healing
from horovod_partial.runtime.appliers import this_thread
from horovod_partial.runtime.runtime import Runtime
from horovod_partial.runtime.tenure import Tenure


class Numbers:
    """Gives numbers to the variables of each process set, the same on every rank.

    A variable gets the next number when it is first used in a process set. Each process set counts separately, because
    its ranks may not know the variables of other process sets. After each `hvd.init()` the count starts from 0 again,
    because new ranks of an elastic job start from 0.
    """

    def __init__(self, runtime: Runtime, native: Callable[[Any], Any]) -> None:
        self._tenure = Tenure(runtime)
        self._native = native  # returns the framework's own object for a variable of Keras
        self._numbers: dict[tuple[str, int], int] = {}
        self._counters: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)

    def of(self, variable: Any, process_set: ProcessSet) -> int:
        """Return the number of a variable in a process set. A variable without a number gets the next one."""
        if self._tenure.enter():
            self._counters.clear()
            self._numbers.clear()
        variable = self._native(variable)
        ranks = str(process_set.ranks)
        key = ranks, id(variable)
        if key not in self._numbers:
            self._numbers[key] = next(self._counters[ranks])
            weakref.finalize(variable, self._numbers.pop, key, None)
        return self._numbers[key]


# The type of a function that applies combined gradients. Its first two arguments are the gradients and their variables.
# The third argument says how many steps per rank, on average, the combined gradients stand for.
Apply = Callable[[list[Any], list[Any], Any], None]

Restore = Callable[[Any], Any]  # the type of a function that makes a gradient from a result of its bucket


class Kind(NamedTuple):
    """The dtype, bytes and place (such as the device) of a gradient that travels. A bucket has one dtype and place."""

    dtype: Any
    nbytes: int
    place: Hashable = None


class Wire(NamedTuple):
    """A gradient in the form that is sent. `restore` converts a result to a gradient; None if the buckets do so."""

    tensor: Any
    kind: Kind
    restore: Restore | None = None


class Planned(NamedTuple):
    """A bucket that is to be made for some gradients of a step.

    `positions` are the positions of the bucket's gradients in the step. `members` has the name and shape of each
    gradient's variable as a text, in the model's order. Ranks compare these texts.
    """

    name: str
    positions: list[int]
    members: tuple[str, ...]
    dtype: Any


class Buckets(Protocol):
    """The buckets for one set of variables. Each framework has its own class. Gradients are in the variables' order.

    `arrived` is what `arrive` has returned: result tensors with TensorFlow, and None with PyTorch.
    """

    @property
    def family(self) -> _attach.Family: ...

    def arrive(self, wires: Sequence[Wire]) -> Any:
        """Contribute the gradients of a step to all buckets. The caller passes the returned value on as `arrived`."""

    def take_first(self, arrived: Any, apply: Apply) -> None:
        """Take the oldest round that has ended, if any, and call `apply` with its gradients."""

    def take_all(self, arrived: Any) -> None:
        """Take and apply all rounds that have ended, oldest first.

        A flush passes None as `arrived`, because it takes rounds without an arrival. It calls this only in eager code.
        """


class Framework(Protocol):
    """What this module needs of a framework."""

    runtime: Runtime

    def number_of(self, variable: Any, process_set: ProcessSet) -> int:
        """Return the number of a variable in a process set, the same on every rank."""

    def divided(self, gradient: Any, divisor: int) -> Any:
        """Return a gradient, dense or sparse, divided by a number."""

    def wire(self, gradient: Any, variable: Any, options: BucketOptions) -> Wire:
        """Return the gradient of a variable in the form that is sent to other ranks."""

    def buckets(
        self, planned: Sequence[Planned], variables: list[Any], options: BucketOptions, apply: Apply | None
    ) -> Buckets:
        """Make the planned buckets of `variables`. `take_all` calls `apply` for each round. Tapes have no `apply`."""

    def reduce_fully(
        self, name: str, gradients: list[Any], variables: list[Any], arguments: dict[str, Any], *, is_optimizer: bool
    ) -> list[Any]:
        """Let Horovod itself combine gradients. Names begin with `name`. `arguments` are those of the optimizer."""


def options_of(
    framework: Framework,
    sync: Policy | SharedUpdates,
    arguments: dict[str, Any],
    *,
    unscaled: bool = False,
    **options: Any,
) -> BucketOptions | None:
    """Check the arguments of a tape or an optimizer of Keras, and return the options of its buckets; None under `Full`.

    The arguments are those of `BucketOptions`. If `unscaled`, every rank skips rounds whose gradients are not finite.
    """
    if isinstance(sync, LateGradients) and sync.missed == "latest":
        raise ValueError(f"{sync!r} is for PyTorch, where it stands for eager-SGD as published: leave missed= out")
    if isinstance(sync, Full):
        check_predivide(arguments)
        return None
    return BucketOptions(
        framework.runtime,
        sync,
        arguments,
        unscaled=unscaled,
        agreed=("a loss scale",) if unscaled else (),
        **options,
    )


def step_name(
    framework: Framework, prefix: str, options: BucketOptions, variables: Sequence[Any], kinds: Sequence[Kind]
) -> str:
    """Return the prefix of the names of a step's buckets. This prefix depends on the variables and on `kinds`.

    `prefix` begins the names of all buckets of the optimizer. `kinds` are the kinds of the variables' gradients.
    """
    numbers = [framework.number_of(variable, options.process_set) for variable in variables]
    members = f"{options.process_set.process_set_id} {numbers} {[str(kind.dtype) for kind in kinds]}"
    return f"{prefix}.{hashlib.sha256(members.encode()).hexdigest()[:8]}"


def plan(
    framework: Framework, name: str, options: BucketOptions, variables: Sequence[Any], kinds: Sequence[Kind]
) -> list[Planned]:
    """Plan the buckets of a step, in reverse order of the variables. All gradients in a bucket have the same dtype.

    `name` is from `step_name`. `kinds` are those of the variables' gradients.
    """
    number = partial(framework.number_of, process_set=options.process_set)
    alike = [(kind.dtype, kind.place) for kind in kinds]
    plans = options.plan(list(map(number, variables)), alike, [kind.nbytes for kind in kinds], key_of=number)
    paths = [getattr(each, "path", each.name).removesuffix(":0") for each in variables]
    # Each process numbers its Keras layers, so a layer's number may differ between ranks. Remove it from the names.
    names = [re.sub(r"_\d+(?=/|$)", "", path) for path in paths]
    members = [bucket_config.member(own, each.shape) for own, each in zip(names, variables, strict=True)]
    return [
        Planned(f"{name}.{index}", positions, tuple(members[i] for i in reversed(positions)), kinds[positions[0]].dtype)
        for index, positions in enumerate(plans)
    ]


class Rounds:
    """Lets flushes apply the rounds of one set of variables, as long as the exchange exists.

    Implements `horovod_partial.runtime.appliers.Applier`.
    """

    is_under_way = False  # no gradients wait for a step: `apply_combined` combines and applies them in one call
    is_applying = False  # no user code, which could flush, runs while a round is applied
    shares_work = False

    def __init__(self, exchange: GradientExchange, buckets: Buckets, variables: list[Any]) -> None:
        self.process_set = exchange.process_set
        self.thread = this_thread()
        self.buckets = buckets
        self._exchange = weakref.ref(exchange)
        self._variables = variables

    @property
    def replica(self) -> healing.Replica | None:
        """The values that a flush compares with other ranks; if it is None, nothing is compared."""
        exchange = self._exchange()
        return None if exchange is None or exchange.replica_of is None else exchange.replica_of(self._variables)

    @property
    def family(self) -> _attach.Family | None:
        """The buckets of the gradients; None once the exchange has been deleted."""
        return None if self._exchange() is None else self.buckets.family

    def apply_rounds(self) -> None:
        """Apply all rounds that this rank can take, oldest first. Only for eager code, not for graphs."""
        self.buckets.take_all(None)


class GradientExchange:
    """Combines the gradients of a step under a gradient policy.

    Under `Full` Horovod combines the gradients, tensor by tensor. Under a partial policy gradients travel in buckets.

    `name` is the prefix of the names of tensors and buckets. `arguments` are those of Horovod's optimizer
    (`compression`, `sparse_as_dense`, `op`, `gradient_predivide_factor`, `groups`, `process_set`, `device_dense`,
    `device_sparse`, `scale_local_gradients`), and `options` are from `options_of`. The gradients of the variables
    in the list `local`, which may grow, are not combined over the ranks. The buckets end when `owner` is deleted. If
    `owner` is None, the buckets stay, and a later exchange of the same variables uses them again. `replica_of` takes
    the trained variables, and returns the values that a flush compares over the ranks. If `replica_of` is None, or
    returns None, nothing is compared.
    """

    def __init__(
        self,
        framework: Framework,
        name: str,
        arguments: dict[str, Any],
        options: BucketOptions | None,
        local: list[Any],
        *,
        owner: _attach.Owner | None = None,
        replica_of: Callable[[list[Any]], healing.Replica | None] | None = None,
    ) -> None:
        self.name = name
        self.options = options
        self.replica_of = replica_of
        self.process_set: ProcessSet = arguments["process_set"]
        self._framework = framework
        self._number = partial(framework.number_of, process_set=self.process_set)
        self._runtime = framework.runtime
        self._arguments = arguments
        self._owner = owner
        self._local = local
        self._rounds: dict[str, Rounds] = {}  # for each set of trained variables, by the prefix of its buckets' names

    @property
    def _local_numbers(self) -> set[int]:
        return set(map(self._number, self._local))

    def register_local(self, variable: Any) -> None:
        """Keep a variable's gradient on this rank. `scale_local_gradients` divides it by the number of ranks."""
        self._number(variable)  # gives the variable its number now, because numbers follow the order of first use
        self._local.append(variable)

    def is_local(self, variable: Any) -> bool:
        """Return whether a variable's gradient stays on this rank, because of `register_local`."""
        return self._number(variable) in self._local_numbers

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the combined gradients of a step, in the order of the variables. None stays None.

        Under a partial policy this is for tapes: a late rank gets the sum of the results that it has missed.
        """
        combined, shared = self._split(gradients, variables)
        if not shared:
            return combined
        own, trained = [combined[i] for i in shared], [variables[i] for i in shared]
        if self.options is None:
            is_optimizer = self._owner is not None
            results = self._framework.reduce_fully(self.name, own, trained, self._arguments, is_optimizer=is_optimizer)
        else:
            name, wires = self._wires(self.options, own, trained)
            # Only tapes come here, so the buckets are TensorFlow's. The protocol `Buckets` lacks their method `sums`.
            buckets: Any = self._buckets(name, self.options, trained, wires, None)
            results = buckets.sums(buckets.arrive(wires))
        for i, result in zip(shared, results, strict=True):
            combined[i] = result
        return combined

    def apply_combined(self, gradients: Sequence[Any], variables: Sequence[Any], apply: Apply) -> None:
        """Combine the gradients of a step, and apply each round that has ended, oldest first. Gradients may be None.

        Over all steps and flushes, every rank calls `apply` once for each round. A late rank may apply several rounds
        in one step. Gradients that stay on this rank are applied with the first round of the step.
        """
        everything = list(variables)
        if self.options is None:
            apply(self.reduce(gradients, everything), everything, 1.0)
            return
        combined, shared = self._split(gradients, everything)
        if not shared:
            apply(combined, everything, 1.0)
            return
        trained = [everything[i] for i in shared]
        name, wires = self._wires(self.options, [gradients[i] for i in shared], trained)
        rounds = self._rounds.get(name)
        if rounds is None:
            rounds = Rounds(self, self._buckets(name, self.options, trained, wires, apply), trained)
        arrived = rounds.buckets.arrive(wires)
        rounds.thread = this_thread()
        if name not in self._rounds:  # only now, because a first step that fails must leave nothing behind
            self._rounds[name] = rounds
            self._runtime.take_part_in_flushes(rounds)

        def with_local_ones(results: list[Any], _: list[Any], steps: Any) -> None:
            for i, result in zip(shared, results, strict=True):
                combined[i] = result
            apply(combined, everything, steps)

        if len(shared) < len(everything):
            rounds.buckets.take_first(arrived, with_local_ones)
        rounds.buckets.take_all(arrived)

    def _split(self, gradients: Sequence[Any], variables: Sequence[Any]) -> tuple[list[Any], list[int]]:
        """Return the gradients, scaled if they stay on this rank, and the positions of the gradients that travel."""
        local = self._local_numbers
        shared = [i for i, each in enumerate(variables) if gradients[i] is not None and self._number(each) not in local]
        scaled = list(gradients)
        if self._arguments["scale_local_gradients"]:
            for i in set(range(len(scaled))) - set(shared):
                if scaled[i] is not None:
                    scaled[i] = self._framework.divided(scaled[i], self._runtime.size_of(self.process_set))
        if not shared or not self.process_set.included():
            return scaled, []
        return scaled, [] if self.options is not None and self._runtime.is_alone(self.process_set) else shared

    def _wires(self, options: BucketOptions, gradients: list[Any], variables: list[Any]) -> tuple[str, list[Wire]]:
        """Return the prefix of the names of a step's buckets, and the gradients in the form that travels."""
        wires = [self._framework.wire(*pair, options) for pair in zip(gradients, variables, strict=True)]
        return step_name(self._framework, self.name, options, variables, [wire.kind for wire in wires]), wires

    def _buckets(
        self, name: str, options: BucketOptions, variables: list[Any], wires: list[Wire], apply: Apply | None
    ) -> Buckets:
        planned = plan(self._framework, name, options, variables, [wire.kind for wire in wires])
        buckets = self._framework.buckets(planned, variables, options, apply)
        if self._owner is not None:
            buckets.family.own(self._owner)
        return buckets

    @property
    def bucket_names(self) -> list[str]:
        """The names of all buckets that steps have used."""
        return [name for rounds in self._rounds.values() for name in rounds.buckets.family.names]

    @property
    def is_in_use(self) -> bool:
        """Whether a round has ended in some bucket since the last `hvd.init()`. Only for eager code."""
        return any(self._runtime.family(self.process_set, [name]).taken for name in self.bucket_names)

    def flush(self) -> None:
        """Deliver all late contributions, and apply the rounds that this rank has missed. Every rank must call this."""
        if self.options is None:
            return
        for rounds in self._rounds.values():
            rounds.thread = this_thread()
        self._runtime.flush(self.process_set.process_set_id)

    @property
    def is_settled(self) -> bool:
        """Whether this rank has no late contributions and no missed results. Only for eager code."""
        if self.options is None or self._runtime.is_alone(self.process_set):
            return True
        names = self._runtime.unsettled(self.process_set.process_set_id)
        return not any(name.startswith(f"{self.name}.") for name in names)

    @property
    def rounds(self) -> int:
        """How many rounds have ended on this rank in all buckets; 0 before the first step. Only for eager code."""
        return self._runtime.family(self.process_set, self.bucket_names).taken
