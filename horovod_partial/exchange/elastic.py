"""Elastic jobs, in which ranks come and go: the part that all frameworks share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from horovod.common.elastic import ObjectState, run_fn
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

from horovod_partial.checks import require
from horovod_partial.runtime.runtime import Runtime


def run(func: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    """Wrap a function with Horovod's `elastic.run`, but restart Horovod by this package's `init` and `shutdown`."""

    @functools.wraps(func)
    def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except HorovodInternalError:
            runtime.failed = True
            raise
        except HostsUpdatedInterrupt:
            # If no host was added, Horovod would not broadcast the state. Demand it: replicas may have missed rounds.
            raise HostsUpdatedInterrupt(skip_sync=False) from None

    return run_fn(watched, runtime.restart)


class VariablesState(ObjectState):  # type: ignore[misc]
    """The variables and properties that all ranks of an elastic job share.

    Subclasses set `functions` of a framework's Horovod: those that broadcast variables and an object, and `rank`.
    """

    functions: tuple[Callable[..., Any], Callable[..., Any], Callable[[], int]]

    def __init__(self, variables: Sequence[Any], **kwargs: Any) -> None:
        self._broadcast_variables, broadcast_object, rank = self.functions
        self.variables = list(variables)
        self._save_variables()
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **kwargs)

    def save(self) -> None:
        """Keep a copy of the present values, to which `restore` goes back."""
        self._save_variables()
        super().save()

    def restore(self) -> None:
        """Set all variables and properties back to the values of the last `save` or `sync`."""
        for variable, value in zip(self.variables, self._values, strict=True):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Give all variables and properties the values of rank 0. All ranks must call this."""
        self._broadcast_variables(self.variables, root_rank=0)
        self._save_variables()
        super().sync()

    def _save_variables(self) -> None:
        self._values = [variable.numpy() for variable in self.variables]


class KerasState(VariablesState):
    """The state of an elastic job that trains a model of Keras 3: the model, its optimizer, and further properties."""

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self.model = model
        self.optimizer = optimizer or getattr(model, "optimizer", None)
        if not model.built:
            raise ValueError("Model must be built first. Run `model.build(input_shape)`.")
        if self.optimizer is None:
            raise ValueError("pass the optimizer, or compile the model first")
        # The user may pass an optimizer of tf_keras, which is Keras 2. Only optimizers of Keras 3 have `built`.
        require(hasattr(self.optimizer, "built"), "optimizer", "one of Keras 3", self.optimizer)
        if not self.optimizer.built:  # an optimizer's variables must exist on every rank before they are broadcast
            self.optimizer.build(model.trainable_variables)
        variables = getattr(self.optimizer, "all_variables", self.optimizer.variables)
        super().__init__([*model.weights, *variables], **kwargs)

    def reset(self) -> None:
        """Make the next `fit` trace the model again. Horovod calls this when the ranks of an elastic job change."""
        self.model.train_function = None
