"""Elastic jobs: `horovod.tensorflow.elastic`, with a `run` that knows of partial collectives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError
from horovod.tensorflow.elastic import TensorFlowKerasState, TensorFlowState

from horovod_partial import elastic
from horovod_partial.tensorflow.graph import runtime

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """`horovod.tensorflow.elastic.run`.

    A graph that was traced for another number of ranks raises: make optimizers and tf.functions within `func`, or in a
    reset callback. Where ranks are added or removed, what is pending is delivered first; where a rank has failed, it is
    lost, as is all that happened after the last commit.
    """

    @functools.wraps(func)
    def translated(*args: Any, **kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except tf.errors.UnknownError as error:
            if "Horovod" not in error.message:
                raise
            raise HorovodInternalError(error.message) from error

    return elastic.run(translated, runtime)
