"""`hvd.load_model`: loads a saved model, and wraps its optimizer again."""

from __future__ import annotations

from typing import Any

import keras

from horovod_partial.keras.optimizer import DistributedOptimizer
from horovod_partial.keras.steps import has_schedule


def load_model(
    filepath: Any,
    custom_optimizers: list[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    **arguments: Any,
) -> keras.Model:
    """Load a model that was saved with `model.save`, and wrap its optimizer. The state of the optimizer is kept.

    Args:
        filepath: same as in `keras.models.load_model`.
        custom_optimizers: optimizer classes of your own.
        custom_objects: same as in `keras.models.load_model`.
        arguments: arguments for `hvd.DistributedOptimizer`, such as `compression` and `sync`.

    Raises:
        ValueError: Keras 3 cannot load the file, or an argument is wrong.
    """
    if arguments.pop("legacy_opts", False):
        raise ValueError("Keras 3 has no legacy optimizers")
    known = {cls.__name__: cls for cls in custom_optimizers or ()} | (custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=known)
    if model.optimizer is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, **arguments)
        if has_schedule(model.optimizer):
            # The wrapped optimizer has one more variable, by which schedules count steps. Load it from the file, too.
            model.load_weights(filepath)
    return model
