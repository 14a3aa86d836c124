"""`hvd.DistributedOptimizer` of TensorFlow, for optimizers of Keras and of TensorFlow 1."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as horovods
import keras
import tensorflow as tf

from horovod_partial import policies
from horovod_partial.policies import Full, Policy
from horovod_partial.settings import settings


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    *,
    sync: Policy | str | None = None,
    **arguments: Any,
) -> Any:
    """Wrap an optimizer so that gradients are combined over the ranks before a step, or models are averaged after it.

    For an optimizer of Keras 3 this is `horovod_partial.keras.DistributedOptimizer`, with the same arguments. An
    optimizer of `tf.compat.v1.train`, and under `hvd.Full()` one of legacy Keras, gets Horovod's own wrapper.

    Args:
        optimizer: an optimizer of Keras 3, of `tf.compat.v1.train`, or of legacy Keras.
        name: prefix of the names of tensors and buckets.
        use_locking: same as in Horovod, for `tf.compat.v1.train`.
        sync: a policy, or its text; an optimizer of `tf.compat.v1.train` takes only `hvd.Full()`.
        arguments: arguments of Horovod's wrapper, or of `horovod_partial.keras.DistributedOptimizer`.

    Raises:
        ValueError: an argument is wrong, or does not suit the policy.
        ImportError: the optimizer is one of Keras 2, and the policy is not `hvd.Full()`.
    """
    policy = policies.resolve(sync, settings().sync)
    of_horovod = [tf.compat.v1.train.Optimizer]
    if not hasattr(tf.keras, "ops") and isinstance(policy, Full):
        of_horovod += [tf.keras.optimizers.Optimizer, tf.keras.optimizers.legacy.Optimizer]
    if not isinstance(optimizer, tuple(of_horovod)):
        if keras.backend.backend() != "tensorflow":
            raise ValueError(
                f"Keras's backend is {keras.backend.backend()}, not TensorFlow; import horovod_partial.keras, which uses "
                "Horovod for that backend"
            )
        # The Keras front end imports `horovod_partial.tensorflow`: an import at the top would be circular.
        from horovod_partial.keras import optimizer as of_keras

        return of_keras.DistributedOptimizer(optimizer, name, sync=sync, **arguments)
    if not isinstance(policy, Full):
        raise ValueError(f"{policy!r} needs an optimizer of Keras; one of tf.compat.v1.train takes hvd.Full()")
    return horovods.DistributedOptimizer(optimizer, name, use_locking, **arguments)
