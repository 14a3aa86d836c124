"""The buckets of an optimizer's gradients: how they are planned, named and owned, and the hooks that fill them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from horovod_partial import _attach
from horovod_partial.exchange.bucket_options import BucketOptions
from horovod_partial.merging import MergedGradients
from horovod_partial.runtime import bucket_config, healing
from horovod_partial.runtime.tenure import Tenure
from horovod_partial.torch.buckets import GradientBucket, GradientFamily, MicroBatchBucket, kind
from horovod_partial.torch.devices import refuse_capture
from horovod_partial.torch.merging import Collectives, Merging
from horovod_partial.torch.operations import runtime
from horovod_partial.torch.replica import ReplicaState
from horovod_partial.torch.wrapping import Name


class BucketSet:
    """The buckets of the parameters that one optimizer trains.

    Gradient hooks run in the thread that calls backward, or for GPUs in threads of autograd. Only the hooks need a
    lock, which `register_hooks` makes. All other code runs in the application's threads, after backward has ended.

    `names` has the names of all parameters, in the order of the model. `travels` says whether gradients travel: this
    rank is in the process set, other ranks are too, and there are parameters to train. `frozen` are parameters that
    were frozen since the optimizer was wrapped. Under work sharing the first bucket is the one that backward completes
    last. The core counts the arrivals at this bucket as finished micro-batches, and then grants further micro-batches.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: dict[torch.nn.Parameter, str],
        options: BucketOptions,
        merging: MergedGradients | None,
    ) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                "LBFGS evaluates its closure several times a step, which buckets cannot follow; use Full() without merging"
            )
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        planned = options.plan(parameters, list(map(kind, parameters)), [p.nbytes for p in parameters])
        self._planned = [[parameters[i] for i in bucket] for bucket in planned][:: -1 if options.shares_work else 1]
        self.process_set = options.process_set
        self.options = options
        self.names = {parameter: names[parameter] for parameter in parameters}
        self.all_names = names  # the names of all parameters, including frozen ones
        self.frozen: set[torch.nn.Parameter] = set()
        self.merging: Merging | None = None
        self.introduction: healing.Introduction | None = None  # compares the parameters of all ranks at the start
        self._merging_options = merging
        self._tenure = Tenure(runtime)  # tells whether the buckets were named since the last `hvd.init()`
        self.hooks: list[Any] = []  # the gradient hooks of parameters; not emptied when the hooks are removed
        self._use({str(index): members for index, members in enumerate(self._planned)})
        self._name = Name(self.process_set, [[names[p] for p in members] for members in self._planned])
        self.travels = bool(parameters) and self.process_set.included() and not runtime.is_alone(self.process_set)

    def _use(self, planned: Mapping[str, Sequence[torch.nn.Parameter]]) -> None:
        make = MicroBatchBucket if self.options.shares_work else GradientBucket
        self.buckets: list[GradientBucket] = [
            make(name, of, self.options, [bucket_config.member(self.names[p], p.shape) for p in reversed(of)])
            for name, of in planned.items()
        ]
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self.family = GradientFamily(self.options, self.buckets)

    def enter(self, replica: ReplicaState | None) -> None:
        """Name the buckets, in the first call after each `hvd.init()`. Later calls do nothing.

        `replica` has the parameters that ranks compare; if it is None, nothing is compared.
        """
        if not self._tenure.enter():
            return
        self._owner = _attach.Owner()  # when every rank has deleted its `Owner`, the buckets end
        self.merging = None
        name = self._name.current()
        if self._merging_options is not None and self.names:
            self.merging = Merging(
                self._merging_options,
                self.names,
                self.process_set,
                name,
                self._planned,
                lambda parameter: parameter.numel() * self.bucket_of[parameter].wire_dtype.itemsize,
            )
            self._use(self.merging.buckets)  # this replaces buckets that an earlier merging plan may have made
        else:
            for index, bucket in enumerate(self.buckets):
                bucket.name = f"{name}.{index}"
            self.family = GradientFamily(self.options, self.buckets)
        start = f"{bucket_config.INTERNAL}start.{name}"
        owned = [start] if self.merging is not None else [*self.family.names, start]  # `Merging` owns its buckets
        runtime.family(self.process_set, owned).own(self._owner)
        if replica is not None and (meeting := runtime.meet(self.process_set)) is not None:
            self.introduction = healing.Introduction(meeting, start, replica.parameters())

    @property
    def is_current(self) -> bool:
        """Whether the buckets were named since the last `hvd.init()`."""
        return self._tenure.is_current

    def register_hooks(self, taker: Any) -> None:
        """Call `taker.gradient(parameter)` for each gradient that backward makes from now on, one at a time.

        The parameters keep the hooks alive. The hooks refer weakly to `taker`, so that it can be freed.
        """
        reference = weakref.ref(taker)
        one_at_a_time = threading.Lock()  # autograd has a thread for each device, and a program may have several too

        def gradient_is_there(parameter: torch.nn.Parameter) -> None:
            found = reference()
            if found is not None:
                refuse_capture(parameter.device)  # raises its error before the taker counts the gradient
                with one_at_a_time:
                    found.gradient(parameter)

        for parameter in self.bucket_of:
            self.hooks.append(parameter.register_post_accumulate_grad_hook(gradient_is_there))  # type: ignore[no-untyped-call]
        weakref.finalize(taker, remove_hooks, self.hooks)

    def check_layers(self, optimizer: Any) -> None:
        """Note frozen parameters. Raises RuntimeError if a parameter in no bucket needs gradients now."""
        everything = [p for group in optimizer.param_groups for p in group["params"]]
        new = [p for p in everything if p.requires_grad and p not in self.bucket_of]
        if new:
            raise RuntimeError(
                f"{self.all_names.get(new[0], 'a parameter')} needs gradients now, and did not when the optimizer was wrapped, "
                "so they would not be reduced: call optimizer.flush(), then wrap an optimizer of what is trained from now on"
            )
        self.frozen = {parameter for parameter in self.bucket_of if not parameter.requires_grad}

    def check_sparse(self, parameter: torch.nn.Parameter) -> None:
        """Raise ValueError if a gradient is sparse, unless `sparse_as_dense` is set."""
        if parameter.grad is not None and parameter.grad.is_sparse and not self.options.sparse_as_dense:
            raise ValueError(
                "buckets cannot hold sparse gradients; pass sparse_as_dense=True, or use Full() without merging"
            )

    def tell(self) -> None:
        """Warn in one of the first steps if the ranks began with different parameters."""
        if self.introduction is not None:
            self.introduction.tell(claims=True)

    def show(self) -> None:
        """Set each `grad` to the parameter's part of its bucket, and to None for frozen parameters."""
        for bucket in self.buckets:
            bucket.show(self.frozen)

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """The parameters that are not frozen."""
        return [parameter for parameter in self.bucket_of if parameter not in self.frozen]

    @property
    def rounds(self) -> int:
        """How many rounds this rank has taken since the last `hvd.init()`, also in buckets of earlier merging plans."""
        if not self.is_current:
            return 0
        return self.merging.rounds if self.merging is not None else self.family.taken

    def replan(self, flush: Callable[[], None]) -> None:
        """Make a new plan of merged gradients between two steps, if one is due.

        `flush` is called before the plan is made. It delivers late contributions, whose buckets are then replaced.
        """
        if self.merging is None or not self.merging.is_due():
            return
        collectives = Collectives(self.process_set, self.family.reduce_probe, self.buckets[0].flat.device)
        if self.merging.replan(collectives, flush):
            self._use(self.merging.buckets)

    def forget(self) -> None:
        """Forget the gradients and results of this rank, late and missed ones too."""
        self.family.abandon()
        if self.is_current:
            self.family.clear()


def remove_hooks(hooks: list[Any]) -> None:
    """Remove gradient hooks: later backward passes put no gradients into the buckets."""
    for hook in hooks:
        hook.remove()
