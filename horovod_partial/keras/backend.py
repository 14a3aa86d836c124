"""Keras's backend, chosen once: `backend` is the module of this package that serves it.

All else in `horovod_partial.keras` is the same on every backend. What differs has the same names in `backend_tensorflow`
and `backend_torch`:

* `horovod`: Horovod's module of the framework; `runtime`: ours; `operations`: our life cycle around it
* `native`, the framework's `Variable` behind one of Keras's, and `number_of` it
* `GradientExchange`; `SharedGradients` and `Updater`, for work sharing
* `uncompiled`: a function that `jit_compile=True` leaves as it is
* `outside_graphs`: a context in which variables have values, also while a graph is made
* `average_`, `signal`, `when_it_runs`: what averages of models are made of
* `broadcast_variables`, `broadcast_`, `average_numbers`, `check_devices`: what callbacks need
* `gather_bytes`: what the check of replicas needs
* `KerasState`, `run`: elastic jobs
"""

from __future__ import annotations

import importlib
from types import ModuleType

import keras

_NAME = keras.backend.backend()
if _NAME not in ("tensorflow", "torch"):
    raise ImportError(
        f"Keras's backend is {_NAME}, which Horovod does not know; set KERAS_BACKEND to tensorflow or torch"
    )

backend: ModuleType = importlib.import_module(f"horovod_partial.keras.backend_{_NAME}")
