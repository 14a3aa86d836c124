"""`hvd.assert_replicas_equal` of Keras: checks that all ranks have the same model."""

from __future__ import annotations

from typing import Any

import keras

from horovod_partial.checks import require
from horovod_partial.exchange import replicas
from horovod_partial.keras.backend import backend
from horovod_partial.keras.replica import ReplicaOfVariables


def assert_replicas_equal(model: keras.Model, optimizer: Any = None) -> None:
    """Compare trainable weights, and the optimizer's variables, over all ranks, bit for bit; every rank must call this.

    The comparison costs a hash of each variable and one small collective. Call `optimizer.flush()` before. Weights that
    are not trainable, such as the moving averages of BatchNorm, and accumulated gradients are not compared, because each
    rank has its own. Only for eager code.

    Args:
        model: the model whose trainable weights are compared.
        optimizer: the optimizer whose variables are compared; None compares none.

    Raises:
        ValueError: an argument is wrong.
        AssertionError: replicas differ. Every rank raises it, and the message names the first variable that
            differs, and the ranks where it differs.
    """
    require(isinstance(model, keras.Model), "model", "a keras.Model", model)
    fits = optimizer is None or isinstance(optimizer, keras.optimizers.Optimizer)
    require(fits, "optimizer", "one of Keras 3", optimizer)
    replica = ReplicaOfVariables(model.trainable_weights, optimizer)
    everyone = backend.horovod.global_process_set
    replicas.check_equal(
        replicas.hashes_of(replica),
        lambda data: backend.gather_bytes(data, "assert_replicas_equal", everyone),
        range(backend.horovod.size()),
    )
