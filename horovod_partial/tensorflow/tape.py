"""`hvd.DistributedGradientTape` with a sync policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.mpi_ops import Average

from horovod_partial import policies
from horovod_partial.checks import require
from horovod_partial.exchange.arguments import (
    check_gradient_arguments,
    check_kinds,
    warn_of_policy,
    with_num_groups,
)
from horovod_partial.exchange.gradients import GradientExchange, options_of
from horovod_partial.exchange.wrapping import subclass
from horovod_partial.policies import ModelPolicy, Policy
from horovod_partial.settings import settings
from horovod_partial.tensorflow.gradients import framework
from horovod_partial.tensorflow.graph import native, runtime


class _Methods:
    """Methods of wrapped tapes. A subclass of the class of the user's tape (`_base`) gets them."""

    is_horovod_partial = True
    _base: Any  # the class of the tape that the user has wrapped
    _exchange: GradientExchange

    def register_local_source(self, source: Any) -> None:
        """Keep a variable's gradient on this rank. `scale_local_gradients` divides it by the number of ranks."""
        self._exchange.register_local(source)

    def gradient(self, target: Any, sources: Any, *args: Any, use_generic_names: bool = False, **kwargs: Any) -> Any:
        """Return the gradients of `tf.GradientTape.gradient`, combined over the ranks."""
        del use_generic_names  # an argument of Horovod's tape, for names of reductions. This tape does not need it
        flat = tf.nest.flatten(sources)
        local = self._base.gradient(self, target, [native(source) for source in flat], *args, **kwargs)
        return tf.nest.pack_sequence_as(sources, self._exchange.reduce(local, flat))

    def get_local_and_global_gradients(
        self, target: Any, sources: Sequence[Any], *args: Any, **kwargs: Any
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return two lists of pairs (source, gradient): pairs whose gradients stay on this rank, and all other pairs.

        Same as Horovod's method of this name.
        """
        local: list[tuple[Any, Any]] = []
        shared: list[tuple[Any, Any]] = []
        for pair in zip(sources, self.gradient(target, sources, *args, **kwargs), strict=True):
            (local if self._exchange.is_local(pair[0]) else shared).append(pair)
        return local, shared


@tf.autograph.experimental.do_not_convert
def DistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    *,
    sync: Policy | str | None = None,
) -> tf.GradientTape:
    """Wrap a tape so that its gradients are combined over the ranks, in eager code or in a `tf.function`.

    The arguments before `sync`, and the methods, are those of `horovod.tensorflow.DistributedGradientTape`, except as
    described here. Variables may be TensorFlow's or Keras's.

    A tape adds up the results that a late rank has missed. One step with a sum differs from several steps, so the
    ranks' models become different, and a warning says so. To keep models equal bit for bit, wrap the optimizer
    (`hvd.DistributedOptimizer`), not the tape.

    Args:
        gradtape: the tape, which may have recorded already. The wrapper shares the recordings.
        device_dense, device_sparse: only for `hvd.Full()`.
        compression: late contributions and missed results are kept compressed.
        sparse_as_dense: a partial policy needs it if gradients are sparse.
        op: a partial policy takes only `hvd.Average` and `hvd.Sum`.
        groups: under a partial policy the gradients of each group travel in one bucket for each dtype.
        sync: `hvd.Full()`, `hvd.Solo()`, `hvd.Majority()`, `hvd.Quorum(...)`, or the policy's name. None takes
            `HOROVOD_PARTIAL_SYNC`, or `Full()` (Horovod's own reduction) if this is not set. Policies that average
            models need `hvd.DistributedOptimizer` instead of a tape.

    Raises:
        ValueError: an argument is wrong, or does not suit the policy.
    """
    policy = policies.resolve(sync, settings().sync)
    if isinstance(policy, ModelPolicy):
        raise ValueError(f"{policy!r} averages models, which a tape does not know; pass it to hvd.DistributedOptimizer")
    require(isinstance(gradtape, tf.GradientTape), "gradtape", "a tf.GradientTape", gradtape)
    if getattr(gradtape, "is_horovod_partial", False):
        raise ValueError("gradtape is a DistributedGradientTape already; wrap the tape itself, and wrap it once")
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
    check_kinds(arguments)
    check_gradient_arguments(arguments)
    warn_of_policy(runtime, policy)
    options = options_of(framework, policy, arguments, replays=False)
    # All wrappers of one tape share its `__dict__`. So each wrapper keeps its own exchange in the slot `_exchange`.
    tape: Any = object.__new__(subclass(type(gradtape), _Methods, __slots__=("_exchange",)))
    tape.__dict__ = gradtape.__dict__
    # Programs make a new tape in each step, so all tapes share one prefix. Names of buckets also depend on variables.
    tape._exchange = GradientExchange(framework, "DistributedGradientTape", arguments, options, local=[])
    return tape
