"""One model on all ranks: the check."""

from __future__ import annotations

import re
from typing import Any

import keras

from horovod_partial.checks import require
from horovod_partial.exchange import replicas
from horovod_partial.keras.backend import backend
from horovod_partial.keras.replica import state_of


def assert_replicas_equal(model: keras.Model, optimizer: Any = None) -> None:
    """Compare trainable weights, and the optimizer's variables, over all ranks, bit for bit; every rank must come.

    Costs a hash of each variable and one small collective. Call `optimizer.flush()` before. What is not trainable, as the
    moving averages of BatchNorm, is each rank's own, and so are gradients that accumulate: they are left out. In eager code.

    Args:
        model: whose weights are compared.
        optimizer: whose variables are compared too; None leaves them out.

    Raises:
        ValueError: an argument is wrong.
        AssertionError: replicas differ; on every rank, with the first variable that does, and the ranks.
    """
    require(isinstance(model, keras.Model), "model", "a keras.Model", model)
    fits = optimizer is None or isinstance(optimizer, keras.optimizers.Optimizer)
    require(fits, "optimizer", "one of Keras 3", optimizer)
    weights = [("weight", variable) for variable in model.trainable_weights]
    state = [("optimizer's variable", variable) for variable in state_of(optimizer)]
    hashes = {}
    for index, (kind, variable) in enumerate([*weights, *state]):
        # Keras numbers layers through the process, so numbers in a path may differ.
        path = re.sub(r"_\d+", "", variable.path)
        value = keras.ops.convert_to_numpy(variable.value)
        hashes[f"{kind} {path} (number {index})"] = replicas.digest(value.tobytes())
    everyone = backend.horovod.global_process_set
    replicas.check_equal(
        hashes,
        lambda data: backend.gather_bytes(data, "assert_replicas_equal", everyone),
        range(backend.horovod.size()),
    )
