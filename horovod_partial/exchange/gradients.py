"""Combines the gradients of a step over the ranks: what TensorFlow's tapes and all optimizers of Keras share."""

from __future__ import annotations

import hashlib
import itertools
import re
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from horovod.common.process_sets import ProcessSet
from horovod.common.util import split_list

from horovod_partial import _attach, _core
from horovod_partial.exchange import bucket_plan
from horovod_partial.exchange.arguments import is_average
from horovod_partial.policies import Full, LateGradients, Policy, SharedUpdates
from horovod_partial.runtime import bucket_config, healing
from horovod_partial.runtime.appliers import this_thread
from horovod_partial.runtime.runtime import Runtime
from horovod_partial.runtime.tenure import Tenure
from horovod_partial.settings import settings


class Numbers:
    """Gives numbers to the variables of each process set, the same on every rank.

    A variable gets the next number when it is first used in a process set. Each process set counts separately, because
    its ranks may not know the variables of other process sets. Each generation counts from 0 again, because ranks that
    are new in an elastic job start from 0.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._tenure = Tenure(runtime)
        self._numbers: dict[tuple[str, int], int] = {}
        self._counters: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)

    def of(self, variable: Any, process_set: ProcessSet) -> int:
        """Return the number of a variable in a process set, and give it one if it has none."""
        if self._tenure.enter():
            self._counters.clear()
            self._numbers.clear()
        ranks = str(process_set.ranks)
        key = ranks, id(variable)
        if key not in self._numbers:
            self._numbers[key] = next(self._counters[ranks])
            weakref.finalize(variable, self._numbers.pop, key, None)
        return self._numbers[key]


# The type of a function that applies combined gradients. Its first two arguments are the gradients and their variables.
# The third argument says how many steps per rank, on average, the combined gradients stand for.
Apply = Callable[[list[Any], list[Any], Any], None]


class StepApplier(ABC):
    """Applies the rounds of an exchange's gradients. Implements `horovod_partial.runtime.appliers.Applier`.

    Flushes use this object as long as the exchange exists. The variables have the order of the gradients. `apply`
    applies the gradients of one round.
    """

    is_under_way = False  # no gradients wait for a step: `apply_combined` combines and applies them in one call
    applies_ahead = False
    is_ahead = False
    is_applying = False  # no code of the user's runs while a round is applied
    shares_work = False

    def declare(self) -> None:  # noqa: B027 - Keras knows no buckets before the first step
        """Do nothing: the first step, which makes this object, has declared the buckets."""

    def __init__(self, exchange: GradientExchange, family: _attach.Family, variables: list[Any], apply: Apply) -> None:
        self.process_set = exchange.process_set
        self.thread = this_thread()
        self._exchange = weakref.ref(exchange)
        self._family = family
        self._variables = variables
        self._apply = apply

    @property
    def replica(self) -> healing.Replica | None:
        """The values that a flush compares with other ranks; None compares nothing."""
        exchange = self._exchange()
        return None if exchange is None or exchange.replica_of is None else exchange.replica_of(self._variables)

    @property
    def family(self) -> _attach.Family | None:
        """The buckets of the gradients; None once the exchange is gone."""
        return None if self._exchange() is None else self._family

    @abstractmethod
    def apply_arrived(self, arrived: Any) -> None:
        """Apply all rounds that have ended, oldest first, after the gradients of a step have arrived.

        `arrived` are the buckets, in the form that `_arrive` of the exchange returned.
        """

    @abstractmethod
    def apply_rounds(self) -> None:
        """Apply all rounds that this rank can take, oldest first. Only for eager code, not for graphs."""

    def apply_ahead(self) -> None:
        raise NotImplementedError


class GradientExchange(ABC):
    """Combines the gradients of a step under a gradient policy.

    Under `Full` Horovod itself combines the gradients, tensor by tensor. Under a partial policy gradients are packed
    into buckets, in reverse order of the variables; all tensors in a bucket have the same dtype.

    `name` is the prefix of the names of tensors and buckets. `arguments` are those of Horovod's optimizer
    (`compression`, `sparse_as_dense`, `op`, `gradient_predivide_factor`, `groups`, `process_set`, `device_dense`,
    `device_sparse`, `scale_local_gradients`). `replays` says whether missed rounds can be applied one by one. With
    `skips_nonfinite` every rank skips rounds with gradients that are not finite. Then late gradients travel even if
    they are not finite, and under a partial policy gradients travel without the loss scale. The buckets end when
    `owner` is gone; None keeps them for any user of the same variables. `replica_of` returns, for the trained
    variables, the values for a flush to compare; None compares nothing. `factor` multiplies each result.
    """

    average: int  # Horovod's number for the operation Average
    total: int  # Horovod's number for the operation Sum
    runtime: Runtime

    def __init__(
        self,
        name: str,
        sync: Policy | SharedUpdates,
        arguments: dict[str, Any],
        *,
        replays: bool,
        skips_nonfinite: bool = False,
        owner: _attach.Owner | None = None,
        replica_of: Callable[[list[Any]], healing.Replica | None] | None = None,
        factor: float = 1.0,
    ) -> None:
        self.name = name
        self.replica_of = replica_of
        self._owner = owner
        self._introduction: healing.Introduction | None = None  # compares the variables of all ranks at the start
        self.process_set: ProcessSet = arguments["process_set"]
        self._full = isinstance(sync, Full)
        self.unscaled = skips_nonfinite and not isinstance(sync, Full)
        self._sync = sync
        self._arguments = arguments
        self._local: set[int] = set()  # the numbers of variables whose gradients are not combined over the ranks
        if isinstance(sync, LateGradients) and sync.missed == "latest":
            raise ValueError(f"{sync!r} is for PyTorch, where it stands for eager-SGD as published: leave missed= out")
        predivide = arguments["gradient_predivide_factor"]
        if predivide != 1.0 and arguments["op"] != self.average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
        if self._full:
            return
        self._average = is_average(arguments["op"], self.average, self.total)
        self._options = {
            "prescale_factor": 1.0 / predivide,
            "postscale_factor": predivide * factor,
            "missed": "replay" if replays else "sum",
            "drop_nonfinite": not skips_nonfinite,
            "agreed": ("a loss scale",) if skips_nonfinite else (),
        }
        self._appliers: dict[str, StepApplier] = {}  # for each prefix of buckets' names, the applier of their rounds
        self._bucket_spec()  # called to raise errors about wrong arguments now, not in the first step

    @staticmethod
    @abstractmethod
    def number_of(variable: Any, process_set: ProcessSet) -> int:
        """Return the number of a variable in a process set, the same on every rank."""

    def _number(self, variable: Any) -> int:
        return self.number_of(variable, self.process_set)

    @staticmethod
    @abstractmethod
    def _divided(gradient: Any, divisor: int) -> Any: ...

    @abstractmethod
    def _reduce_fully(self, gradients: list[Any], variables: list[Any]) -> list[Any]: ...

    @abstractmethod
    def _reduce_partially(self, gradients: list[Any], variables: list[Any]) -> list[Any]: ...

    @abstractmethod
    def _arrive(self, gradients: list[Any], variables: list[Any]) -> tuple[str, Any]:
        """Arrive with all gradients of a step at the buckets of a family, and wait for the rounds.

        Returns the prefix of the buckets' names, and the buckets in the form that the applier needs.
        """

    @abstractmethod
    def _applier_of(self, arrived: Any, variables: list[Any], apply: Apply) -> StepApplier:
        """Make the object that applies the rounds of the buckets that `_arrive` returned."""

    @abstractmethod
    def _apply_first(self, arrived: Any, apply: Callable[[list[Any], Any], None]) -> None:
        """Take the oldest round that has ended, if any. Call `apply` with its results and their number of gradients."""

    @abstractmethod
    def _bucket_names(self) -> Iterable[str]: ...

    def register_local(self, variable: Any) -> None:
        """Keep this variable's gradient on this rank; `scale_local_gradients` divides it by the number of ranks."""
        self._local.add(self._number(variable))

    def is_local(self, variable: Any) -> bool:
        """Return whether a variable's gradient stays on this rank, because of `register_local`."""
        return self._number(variable) in self._local

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the combined gradients of a step, in the order of the variables. None stays None."""
        shared = [i for i, each in enumerate(variables) if gradients[i] is not None and not self.is_local(each)]
        combined = self._scaled_local(gradients, shared)
        if not shared or not self.process_set.included():
            return combined
        results = self._reduce([combined[i] for i in shared], [variables[i] for i in shared])
        for i, result in zip(shared, results, strict=True):
            combined[i] = result
        return combined

    def apply_combined(self, gradients: Sequence[Any], variables: Sequence[Any], apply: Apply) -> None:
        """Combine the gradients of a step, and apply each round that has ended, oldest first. Gradients may be None.

        Every rank calls `apply` for each round. A rank that is on time applies one round. Gradients that stay on this
        rank are applied with the first round.
        """
        everything = list(variables)
        shared = [i for i, each in enumerate(everything) if gradients[i] is not None and not self.is_local(each)]
        travels = (
            not self._full and shared and self.process_set.included() and not self.runtime.is_alone(self.process_set)
        )
        if not travels:
            apply(self(gradients, everything), everything, 1.0)
            return
        combined = self._scaled_local(gradients, shared)
        trained = [everything[i] for i in shared]

        name, arrived = self._arrive([gradients[i] for i in shared], trained)
        applier = self._appliers.get(name)
        if applier is None:
            applier = self._appliers[name] = self._applier_of(arrived, trained, apply)
            self.runtime.take_part_in_flushes(applier)
        applier.thread = this_thread()

        def with_local_ones(results: list[Any], count: Any) -> None:
            for i, result in zip(shared, results, strict=True):
                combined[i] = result
            apply(combined, everything, self.runtime.steps_of(applier._family, count))

        if len(shared) < len(everything):
            self._apply_first(arrived, with_local_ones)
        applier.apply_arrived(arrived)

    def _scaled_local(self, gradients: Sequence[Any], shared: list[int]) -> list[Any]:
        combined = list(gradients)
        if self._arguments["scale_local_gradients"]:
            for i in set(range(len(combined))) - set(shared):
                if combined[i] is not None:
                    combined[i] = self._divided(combined[i], self.runtime.size_of(self.process_set))
        return combined

    def _reduce(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        if self._full:
            return self._reduce_fully(gradients, variables)
        if self.runtime.is_alone(self.process_set):
            return gradients
        return self._reduce_partially(gradients, variables)

    def _own(self, names: Iterable[str]) -> None:
        if self._owner is not None:
            self.runtime.family(self.process_set, names).own(self._owner)

    @property
    def is_in_use(self) -> bool:
        """Whether a round has ended in some of the buckets in this generation. Only for eager code."""
        names = () if self._full else self._bucket_names()
        return any(self.runtime.family(self.process_set, [name]).taken for name in names)

    def enter_generation(self, local: Iterable[Any]) -> None:
        """Belong to this generation of Horovod from now on. `local` are the variables that `register_local` has named."""
        self._own(self._bucket_names())
        self._local = {self._number(variable) for variable in local}

    def introduce(self, variables: Mapping[healing.Key, healing.Array]) -> None:
        """Begin to compare the variables that ranks begin to train. From now on flushes compare replicas, too."""
        meeting = self.runtime.meet(self.process_set)
        if meeting is not None:
            start = f"{bucket_config.INTERNAL}start.{self.name}"
            self._own([start])
            self._introduction = healing.Introduction(meeting, start, variables)

    def tell(self) -> bool:
        """Log a warning if the ranks began with different variables. Returns False while that is not known."""
        return self._introduction is None or self._introduction.tell(claims=False)

    def _bucket_spec(self, members: Sequence[str] = ()) -> _core.BucketSpec:
        return bucket_config.arguments(
            sync=self._sync,
            size=self.runtime.size_of(self.process_set),
            average=self._average,
            members=members,
            **self._options,
        )

    def _step_name(self, variables: Sequence[Any], dtypes: Sequence[Any]) -> str:
        """Return the prefix of the names of a step's buckets. It depends on the variables and the types that travel."""
        numbers = [self._number(variable) for variable in variables]
        members = f"{self.process_set.process_set_id} {numbers} {[str(dtype) for dtype in dtypes]}"
        return f"{self.name}.{hashlib.sha256(members.encode()).hexdigest()[:8]}"

    @staticmethod
    def _members(variables: Sequence[Any]) -> tuple[str, ...]:
        """Return a text for each variable of a bucket, in the model's order. Ranks compare these texts."""
        # Each process numbers its Keras layers, so a layer's number may differ between ranks. Remove it from the names.
        names = [
            re.sub(r"_\d+(?=/|$)", "", getattr(each, "path", each.name).removesuffix(":0"))
            for each in reversed(variables)
        ]
        shapes = [each.shape for each in reversed(variables)]
        return tuple(map(bucket_config.member, names, shapes))

    def _plan(
        self,
        variables: Sequence[Any],
        kinds: Sequence[Hashable],
        sizes: Sequence[int],
        bucket_bytes: float | None = None,
    ) -> list[list[int]]:
        """Plan which gradients travel together. Returns the positions of the gradients in each bucket.

        `bucket_bytes` is the size of buckets; None takes `HOROVOD_PARTIAL_BUCKET_MB`.
        """
        size = settings().bucket_mb * 1e6 if bucket_bytes is None else bucket_bytes
        return bucket_plan.plan(kinds, sizes, self._groups([self._number(v) for v in variables]), size)

    def _groups(self, numbers: list[int]) -> list[list[int]]:
        groups = self._arguments["groups"]
        if groups is None:
            return []
        if isinstance(groups, int):
            return split_list(list(range(len(numbers))), groups)
        positions = {number: i for i, number in enumerate(numbers)}
        wanted = [[self._number(variable) for variable in group] for group in groups]
        return [[positions[number] for number in group if number in positions] for group in wanted]

    def flush(self) -> None:
        """Deliver all late contributions, and apply the rounds that this rank has missed. Every rank must call this."""
        if self._full:
            return
        for applier in self._appliers.values():
            applier.thread = this_thread()
        self.runtime.flush(self.process_set.process_set_id)

    @property
    def is_settled(self) -> bool:
        """Whether this rank has no late contributions and no missed results. Only for eager code."""
        if self._full or self.runtime.is_alone(self.process_set):
            return True
        names = self.runtime.unsettled(self.process_set.process_set_id)
        return not any(name.startswith(f"{self.name}.") for name in names)

    @property
    def rounds(self) -> int:
        """How many rounds have ended on this rank in all buckets; 0 before the first step. Only for eager code."""
        return self.runtime.family(self.process_set, self._bucket_names()).taken
