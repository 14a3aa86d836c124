"""PyTorch's and TensorFlow's Horovod in one process: `two_frameworks.py torch|tensorflow`, which names the first import."""

from __future__ import annotations

import sys

from common import RANK, note

if sys.argv[1] == "torch":
    import horovod.tensorflow as hvd_tf
    import tensorflow as tf
    import torch

    import horovod_partial.torch as hvd
else:
    import horovod.tensorflow as hvd_tf
    import tensorflow as tf
    import torch

    import horovod_partial.torch as hvd

torch.set_num_threads(1)
hvd.init()
hvd_tf.init()
size = hvd.size()
total = 0
for step in range(10):
    total += hvd.partial_allreduce(torch.tensor([10 * step + RANK]), name="bucket", op=hvd.Sum, sync="solo").item()
    theirs = hvd_tf.allreduce(tf.constant([float(RANK + step)]), name=f"tf.{step}", op=hvd_tf.Sum)
    assert theirs.numpy().tolist() == [sum(rank + step for rank in range(size))]
    ours = hvd.allreduce(torch.tensor([float(RANK)]), name="torch", op=hvd.Sum)
    assert ours.item() == sum(range(size))
hvd.flush()
from harness.buckets import collect

total += collect("bucket", torch.zeros(1, dtype=torch.int64)).item()
assert total == sum(10 * step + rank for step in range(10) for rank in range(size)), total
note("done")
