"""Chooses the module for Keras's backend once: `backend` is `backend_tensorflow` or `backend_torch`.

All else in `horovod_partial.keras` is the same on every backend. Both modules have the same names:

* `horovod`: Horovod's module for the framework. `runtime` and `operations`: those of our front end for the framework
* `Variable`: the framework's class of variables. `native`: converts a variable of Keras to this class
* `framework`: for the exchange of gradients. `dense`, `SharedGradients` and `updater`: for work sharing
* `uncompiled`: keeps `jit_compile=True` from compiling a function
* `outside_graphs`: a context in which variables have values, even while a graph is made
* `average_`, `signal`, `when_it_runs`: for averages of models
* `broadcast_variables`, `broadcast_`, `average_numbers`, `check_devices`: for callbacks
* `BalancedBatchSampler`: for data
* `KerasState`, `run`: for elastic jobs
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
