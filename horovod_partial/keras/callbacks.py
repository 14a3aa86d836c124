"""Callbacks for `model.fit` on Keras 3: Horovod's, and those that partial collectives need."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import keras
from horovod.common.process_sets import ProcessSet, global_process_set

from horovod_partial.checks import is_flag, is_number, require, require_count
from horovod_partial.exchange.arguments import check_kinds
from horovod_partial.keras.backend import backend
from horovod_partial.keras.models import is_floating
from horovod_partial.keras.replica import variables_of
from horovod_partial.keras.steps import Rates, set_rate, steps_of
from horovod_partial.keras.work_sharing import shares_work
from horovod_partial.policies import Quorum
from horovod_partial.runtime.round_stats import Progress, slowness_now


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Broadcast one rank's weights and optimizer state to all ranks, at the beginning of training.

    The broadcast comes before the first step, or after the first batch if this batch builds the model. Metrics and the
    state of random generators are not broadcast.

    Args:
        root_rank: the rank that sends its values.
        device: same as in Horovod; refused on PyTorch.
        local_variables: a variable, or several, that are not broadcast.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        require_count("root_rank", root_rank, 0)
        check_kinds({"device": device})
        backend.check_devices(device=device)
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        self._local: set[int] = set()
        for variable in keras.tree.flatten([] if local_variables is None else local_variables):
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Do not broadcast a variable. Each rank keeps its own values."""
        require(isinstance(backend.native(var), backend.Variable), "local_variables", "variables of Keras", var)
        self._local.add(id(backend.native(var)))

    def on_train_begin(self, logs: Any = None) -> None:
        optimizer = self.model.optimizer
        if not (self.model.built and self.model.weights):  # `build` of a subclass may have made no weights
            if shares_work(optimizer):
                raise RuntimeError(
                    "build the model before fit, for example with model(inputs): under hvd.WorkSharing() ranks cannot get "
                    "equal weights after the first batch, because its gradients are on their way then"
                )
            return
        if optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._broadcast()

    def _broadcast(self) -> None:
        if self.broadcast_done:
            return
        variables = [*self.model.weights, *variables_of(self.model.optimizer)]
        shared = [variable for variable in variables if id(backend.native(variable)) not in self._local]
        backend.broadcast_(shared, self.root_rank, self.device)
        self.broadcast_done = True


class MetricAverageCallback(keras.callbacks.Callback):
    """Average the metrics of an epoch over all ranks.

    Put this callback before callbacks that use metrics, such as `ReduceLROnPlateau` and `TensorBoard`. All ranks must
    have the same metrics. Under `hvd.WorkSharing` a rank's training metrics are weighted by its number of micro-batches
    in the epoch, which may be 0. Metrics of validation (`val_...`) have equal weights.

    Args:
        device: same as in Horovod; refused on PyTorch.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        check_kinds({"device": device})
        backend.check_devices(device=device)
        self.device = device
        self._batches = 0  # how many batches of the present epoch have ended

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches += 1

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None and shares_work(self.model.optimizer):
            logs.update(self._of_shared_work(logs))
        elif logs:
            self._average(logs)

    def _of_shared_work(self, logs: dict[str, Any]) -> dict[str, float]:
        self.model.optimizer.flush()
        own = self._batches, {name: float(value) for name, value in logs.items()}
        weighted: dict[str, list[tuple[float, float]]] = {}
        for batches, values in backend.horovod.allgather_object(own, name="MetricAverageCallback"):
            for name, value in values.items():
                weighted.setdefault(name, []).append((1.0 if name.startswith("val_") else batches, value))
        return {
            name: sum(weight * value for weight, value in pairs if weight) / sum(weight for weight, _ in pairs)
            for name, pairs in weighted.items()
            if any(weight for weight, _ in pairs)
        }

    def _average(self, logs: dict[str, Any]) -> None:
        flush = getattr(self.model.optimizer, "flush", None)
        if flush is not None:  # the average waits for all ranks anyway, so use the wait to apply missed rounds
            flush()
        names = sorted(logs)
        averages = backend.average_numbers(
            [float(logs[name]) for name in names], name="MetricAverageCallback", device=self.device
        )
        logs.update(zip(names, averages, strict=True))


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Set the learning rate to `initial_lr * multiplier`, from `start_epoch` to `end_epoch`.

    Under a partial policy that replays missed rounds, the number of steps in all earlier rounds decides the rate of a
    round. So all ranks apply a round at the same rate. Under such a policy this callback flushes when training begins,
    and needs `steps_per_epoch`.

    Args:
        initial_lr: the learning rate at the start of training.
        multiplier: a function of the epoch, or a number that is raised to the power of the epochs since `start_epoch`.
        start_epoch: the first epoch in which the rate is set.
        end_epoch: the first epoch in which the rate is not set any more; None for never.
        staircase: whether to set the rate only at the start of an epoch, and give `multiplier` the epoch's number.
            Otherwise the rate is set before every batch, and `multiplier` gets `epoch + batch / steps_per_epoch`.
        momentum_correction: whether to scale the velocities of optimizers with `momentum` together with the learning
            rate, because velocities contain the rate (https://arxiv.org/abs/1706.02677, remark 2).
        steps_per_epoch: steps in an epoch; only needed if Keras does not know it.

    Raises:
        ValueError: an argument is wrong; or training begins, and the number of steps in an epoch is unknown.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        require(is_number(initial_lr), "initial_lr", "a number", initial_lr)
        fits = callable(multiplier) or is_number(multiplier)
        require(fits, "multiplier", "a number, or a function of the epoch", multiplier)
        require(is_number(start_epoch), "start_epoch", "a number", start_epoch)
        require(end_epoch is None or is_number(end_epoch), "end_epoch", "a number", end_epoch)
        require(is_flag(staircase), "staircase", "True or False", staircase)
        require(is_flag(momentum_correction), "momentum_correction", "True or False", momentum_correction)
        if steps_per_epoch is not None:
            require_count("steps_per_epoch", steps_per_epoch, 1)
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch: Any = steps_per_epoch  # if it is None, Keras's own number from `on_train_begin` on
        self.current_epoch = 0
        self._multiplier = multiplier

    def multiplier(self, epoch: float) -> float:
        """Return the factor by which the initial learning rate is multiplied in an epoch."""
        if callable(self._multiplier):
            return self._multiplier(epoch)
        return self._multiplier ** (epoch - self.start_epoch)

    @property
    def _rates(self) -> Rates | None:
        state = getattr(self.model.optimizer, "_horovod", None)
        return None if state is None else state.rates

    def on_train_begin(self, logs: Any = None) -> None:
        if not self.steps_per_epoch and not (self.staircase and self._rates is None):
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    "Could not autodetect the number of steps per epoch. Please specify the steps_per_epoch parameter to the "
                    f"{type(self).__name__}()."
                )
        if self._rates is not None:
            optimizer = self.model.optimizer
            optimizer.learning_rate = float(optimizer.learning_rate)  # Keras raises an error if the rate has a schedule
            self._first: int | None = None  # the optimizer's number of steps at the start of epoch 0
            self._is_under_way = False
            self._rates.add(self)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch
        if self._rates is not None and self._first is None:
            self.model.optimizer.flush()  # flush, so that all ranks begin with the same round
            self._first = steps_of(self.model.optimizer) - epoch * self.steps_per_epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._rates is not None or (self.staircase and batch > 0):
            return
        rate = self._rate_at(self.current_epoch, batch)
        if rate is not None:
            optimizer = self.model.optimizer
            set_rate(optimizer, rate, self.correction(float(optimizer.learning_rate), rate))

    def rate_after(self, steps: int) -> float | None:
        """Return the learning rate of the round after `steps` applied steps; None for no change."""
        assert self._first is not None
        step, per_epoch = steps - self._first, self.steps_per_epoch
        last = math.inf if self.end_epoch is None else math.ceil(self.end_epoch) * per_epoch - 1
        if self._is_under_way and step > last:
            step = int(last)  # the count has jumped over the last step before `end_epoch`: set that step's rate now
        rate = self._rate_at(*divmod(step, per_epoch))
        self._is_under_way = rate is not None and step < last
        return rate

    def _rate_at(self, epoch: int, batch: int) -> float | None:
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return None
        if not self.staircase:
            return self.initial_lr * self.multiplier(epoch + batch / self.steps_per_epoch)
        return self.initial_lr * self.multiplier(epoch)

    def correction(self, before: float, after: float) -> float:
        """Return the factor for an optimizer's velocities when the learning rate changes from `before` to `after`."""
        return after / before if self.momentum_correction and before > 0 else 1.0

    def on_train_end(self, logs: Any = None) -> None:
        if self._rates is not None:
            self._rates.remove(self)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate from `initial_lr / hvd.size()` to `initial_lr`, by a small amount before each batch.

    Args:
        initial_lr: the learning rate after the warm-up.
        warmup_epochs: the number of epochs of the warm-up, which may be a fraction.
        momentum_correction: same as in `LearningRateScheduleCallback`.
        steps_per_epoch: steps in an epoch; only needed if Keras does not know it.
        verbose: 1 prints a line on rank 0 when the warm-up is over.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        require(is_number(warmup_epochs) and warmup_epochs >= 0, "warmup_epochs", "a number, 0 or more", warmup_epochs)

        def multiplier(epoch: float) -> float:
            # Count one batch more, so that the warm-up's last batch has the full learning rate.
            epoch = min(epoch + 1.0 / self.steps_per_epoch, warmup_epochs)
            size = backend.horovod.size()
            return (epoch * (size - 1) / warmup_epochs + 1) / size

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=math.ceil(warmup_epochs),
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if epoch + 1 == self.end_epoch and self.verbose > 0 and backend.horovod.rank() == 0:
            rate = float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Save the best model, same as Horovod's callback of this name: a `ModelCheckpoint` whose file path is set later.

    Set its `filepath` before `fit`, on the one rank that saves. The arguments are those of
    `keras.callbacks.ModelCheckpoint`.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        *,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ) -> None:
        super().__init__(
            filepath="unset.weights.h5" if save_weights_only else "unset.keras",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath: str | None = None  # None until set. Keras 3 does not accept None as the argument `filepath`

    def on_train_begin(self, logs: Any = None) -> None:
        if self.filepath is None:
            raise ValueError("set the filepath of BestModelCheckpoint before fit: callback.filepath = 'best.keras'")
        super().on_train_begin(logs)


class FlushCallback(keras.callbacks.Callback):
    """Flush after the last batch of each epoch, so that evaluated and saved models contain late gradients.

    Wherever this callback is in the list, the flush comes before validation, and before other callbacks save. But if
    Keras does not know how many batches an epoch has, the flush comes at the end of the epoch. Then put this callback
    before `ModelCheckpoint`. All ranks wait for each other in a flush, so they need the same number of epochs.
    """

    def __init__(self) -> None:
        super().__init__()
        self._has_flushed = False  # whether a flush came after the newest step of this epoch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._has_flushed = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._has_flushed = False
        if batch + 1 == self.params.get("steps"):
            self._flush()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._flush()

    def on_train_end(self, logs: Any = None) -> None:
        self._flush()

    def _flush(self) -> None:
        if self._has_flushed:
            return
        self._has_flushed = True
        flush = getattr(self.model.optimizer, "flush", None)
        if flush is None:
            raise ValueError("FlushCallback needs a model that was compiled with hvd.DistributedOptimizer")
        flush()


class ModelSyncCallback(keras.callbacks.Callback):
    """Average the model over the ranks of `process_set` from time to time.

    All floating-point weights are averaged, including those of BatchNorm.

    Use this callback if the ranks' models may become different. All ranks wait for each other in an average.

    Args:
        every_n_steps: steps of this rank between two averages, 1 or more.
        every_n_epochs: epochs between two averages, 1 or more. Give `every_n_steps` or `every_n_epochs`, not both.
        process_set: the ranks that take part.

    Raises:
        ValueError: both `every_n_steps` and `every_n_epochs` are given, or neither, or the one given is below 1.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__()
        given = [number for number in (every_n_steps, every_n_epochs) if number is not None]
        if len(given) != 1:
            raise ValueError("give every_n_steps or every_n_epochs, 1 or more")
        require_count("every_n_steps" if every_n_epochs is None else "every_n_epochs", given[0], 1)
        check_kinds({"process_set": process_set})
        self.every_n_steps = every_n_steps
        self.every_n_epochs = every_n_epochs
        self.process_set = process_set
        self._steps = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps += 1
        if self.every_n_steps is not None and self._steps % self.every_n_steps == 0:
            self._average()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.every_n_epochs is not None and (epoch + 1) % self.every_n_epochs == 0:
            self._average()

    def _average(self) -> None:
        variables = [variable for variable in self.model.weights if is_floating(variable)]
        if not variables:
            return
        # The bucket is named after the weights' dtypes and shapes, so that all callbacks for one model share it.
        kinds = f"{[(keras.backend.standardize_dtype(v.dtype), tuple(v.shape)) for v in variables]}"
        name = f"ModelSyncCallback.{hashlib.sha256(kinds.encode()).hexdigest()[:8]}"
        backend.average_(variables, name, Quorum(1.0), self.process_set)


class PartialStatsCallback(keras.callbacks.Callback):
    """Add what happened to the rounds of an epoch to its logs: for the progress bar, `History` and `TensorBoard`.

    Put this callback before `TensorBoard`. It adds `late`: the share of this rank's contributions that came too late, 0
    to 1; `fresh`: the mean number of ranks that were on time for a round; `staleness`: by how many rounds contributions
    were late, on average; `waited_seconds`: how long this rank waited for results. Nothing is added under `hvd.Full()`,
    which has no rounds; `SlowRanksCallback` also works under `hvd.Full()`.

    Args:
        process_set: the process set of the buckets.
    """

    def __init__(self, process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        check_kinds({"process_set": process_set})
        self.process_set = process_set
        self._progress: Progress | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        if self.process_set.included():
            number = self.process_set.process_set_id
            self._progress = Progress(lambda: backend.runtime.statistics(number), self.process_set.rank())

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None and self._progress is not None:
            logs.update(self._progress.since())


class SlowRanksCallback(keras.callbacks.Callback):
    """On rank 0 of a watched job, add to the logs of an epoch how many ranks are slow.

    Put this callback after `MetricAverageCallback`, which needs the same logs on all ranks, and before `TensorBoard`.
    It adds `slow_ranks`: how many ranks are slow at the end of the epoch; and `slowness`, that of the slowest of them
    (`docs/slow-ranks.md`), or 1. Nothing is added if ranks are not watched (`hvd.watch`).
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs.update(slowness_now(backend.runtime.watched_ranks()))
