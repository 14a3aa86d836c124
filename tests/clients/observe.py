"""Runs an unedited program, `observe.py PROGRAM` or `observe.py -m MODULE`, and writes down what model each rank ends with.

What the program must not be told goes by variables of the environment: `CLIENT_NOTES` is the folder for each rank's digest,
`CLIENT_SLOW` the rank that sleeps before each backward pass, `CLIENT_STEPS` a bound for loops that have no argument for it,
`CLIENT_MNIST` the file that Keras reads instead of downloading one, `CLIENT_CIFAR` says that the pictures are made,
`CLIENT_ABSENT` names modules that are not installed and that may do nothing here, and `CLIENT_OUTCOME` a file that rank 0 has
written, where that says what was trained.
"""

import functools
import hashlib
import importlib.util
import json
import os
import random
import runpy
import sys
import time
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np

RANK = int(os.environ.get("HOROVOD_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
PAUSE_SECONDS = 0.05
trained: dict[int, Any] = {}  # parameters and variables that an optimizer was given, in this order
steps = 0


def absent(name: str) -> MagicMock:
    """Something to import in place of a module that is not installed, of which each call does nothing."""
    module = MagicMock()
    module.__spec__ = ModuleSpec(name, None)  # PyTorch looks at it
    return module


def before(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Let `call` run, with the same arguments, before each call of a method."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def both(*arguments: Any, **options: Any) -> Any:
        call(*arguments, **options)
        return method(*arguments, **options)

    setattr(owner, name, both)


def step(*_: Any, **__: Any) -> None:
    """What happens before each backward pass, or each call of a TensorFlow function."""
    global steps
    steps += 1
    if os.environ.get("CLIENT_SLOW") == str(RANK):
        time.sleep(PAUSE_SECONDS)


def watch_torch() -> None:
    """Collect the parameters of PyTorch's optimizers, and count backward passes."""
    import torch

    # PyPI's torchvision is for CUDA. Its library cannot be loaded beside a PyTorch without, and then these names are missing.
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

    def collect(_: Any, group: dict[str, Any]) -> None:
        given = group["params"]
        group["params"] = given = [given] if isinstance(given, torch.Tensor) else list(given)
        trained.update((id(p), p) for p in (p[1] if isinstance(p, tuple) else p for p in given))

    if os.environ.get("CLIENT_CIFAR"):
        from torchvision.datasets import cifar

        cifar.check_integrity = lambda *_: True  # which asks for the hashes of the real pictures

    # An argument that was taken out of PyTorch.
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    make = plateau.__init__
    plateau.__init__ = lambda self, *given, verbose=None, **options: make(self, *given, **options)

    before(torch.optim.Optimizer, "add_param_group", collect)
    before(torch.Tensor, "backward", step)
    torch.manual_seed(RANK)
    torch.set_num_threads(1)


def watch_tensorflow() -> None:
    """Collect the variables of Keras's optimizers, and count calls of functions."""
    import keras
    import tensorflow as tf
    from keras.src.datasets import mnist
    from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function

    before(Function, "__call__", step)
    optimizers = [keras.optimizers.Optimizer]
    if importlib.util.find_spec("tf_keras"):
        import tf_keras
        from tf_keras.src.datasets import mnist as old_mnist

        optimizers.append(tf_keras.optimizers.Optimizer)
        keras.backend.constant = tf_keras.backend.constant  # Horovod's callbacks look for it there
        old_mnist.get_file = lambda *_, **__: os.environ["CLIENT_MNIST"]
    for optimizer in optimizers:
        before(optimizer, "build", lambda _, variables: trained.update((id(v), v) for v in variables))
    bound = int(os.environ.get("CLIENT_STEPS", "1000000"))
    take = tf.data.Dataset.take
    tf.data.Dataset.take = lambda dataset, count, *more, **options: take(dataset, min(bound, count), *more, **options)
    mnist.get_file = lambda *_, **__: os.environ["CLIENT_MNIST"]
    tf.keras.utils.set_random_seed(RANK)


def note() -> None:
    """Write what this rank has trained."""
    digest = hashlib.sha256()
    for value in trained.values():
        array = value.detach().cpu().numpy() if hasattr(value, "detach") else np.asarray(value.numpy())
        digest.update(str((array.shape, array.dtype)).encode() + array.tobytes())
    outcome = os.environ.get("CLIENT_OUTCOME")
    if outcome and RANK == 0 and Path(outcome).exists():
        digest.update(Path(outcome).read_bytes())
    text = json.dumps({"model": digest.hexdigest(), "tensors": len(trained), "steps": steps})
    Path(os.environ["CLIENT_NOTES"], f"rank.{RANK}.json").write_text(text)


if __name__ == "__main__":
    random.seed(RANK)
    np.random.seed(RANK)
    sys.modules.update((name, absent(name)) for name in os.environ.get("CLIENT_ABSENT", "").split())
    if os.environ["CLIENT_FRAMEWORK"] == "torch":
        watch_torch()
    elif os.environ["CLIENT_FRAMEWORK"] == "tensorflow":
        watch_tensorflow()
    by_name = sys.argv[1] == "-m"
    sys.argv = sys.argv[2 if by_name else 1 :]
    sys.path[0] = os.getcwd() if by_name else os.path.dirname(os.path.realpath(sys.argv[0]))
    try:
        names = (  # of the program, which live until its model is noted
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            if by_name
            else runpy.run_path(sys.argv[0], run_name="__main__")
        )
    finally:
        note()
