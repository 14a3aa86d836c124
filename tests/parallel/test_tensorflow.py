"""Partial collectives of TensorFlow's tensors: in eager code, in graphs, after saving; their arguments and errors."""

from __future__ import annotations

import pytest
import tensorflow as tf
from harness.world import World

import horovod_partial.tensorflow as hvd

pytestmark = pytest.mark.launch(framework="tensorflow")


def test_everybody_in_a_graph(world: World) -> None:
    @tf.function
    def reduce(tensor: tf.Tensor) -> tf.Tensor:
        return hvd.partial_allreduce(tensor, name=world.name(), op=hvd.Sum, sync="quorum:1.0")

    for step in range(5):
        assert reduce(tf.fill([3], float(world.rank + step))).numpy().tolist() == [
            float(sum(rank + step for rank in world.ranks))
        ] * 3
