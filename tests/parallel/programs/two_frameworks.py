"""PyTorch's and TensorFlow's Horovod in one process: `two_frameworks.py torch|tensorflow`, which names the first import."""

import importlib
import sys

from common import RANK, note

first, second = sys.argv[1], {"torch": "tensorflow", "tensorflow": "torch"}[sys.argv[1]]
importlib.import_module(f"horovod_partial.{first}").init()
importlib.import_module(f"horovod_partial.{second}").init()

import numpy as np
import tensorflow as tf
import torch
from harness.buckets import collect

import horovod_partial.tensorflow as hvd_tf
import horovod_partial.torch as hvd

torch.set_num_threads(1)
size = hvd.size()
assert hvd_tf.size() == size
everything = sum(10 * step + rank for step in range(10) for rank in range(size))
total, total_tf = 0, 0
for step in range(10):
    own = 10 * step + RANK
    # The same name in both: they are two Horovods, and know nothing of each other.
    total += hvd.partial_allreduce(torch.tensor([own]), name="bucket", op=hvd.Sum, sync="solo").item()
    total_tf += int(hvd_tf.partial_allreduce(tf.constant([own]), name="bucket", op=hvd_tf.Sum, sync="solo")[0])
    theirs = hvd_tf.allreduce(tf.constant([float(RANK + step)]), name=f"tf.{step}", op=hvd_tf.Sum)
    assert theirs.numpy().tolist() == [sum(rank + step for rank in range(size))]
    ours = hvd.allreduce(torch.tensor([float(RANK)]), name="torch", op=hvd.Sum)
    assert ours.item() == sum(range(size))
hvd.flush()
total += collect("bucket", torch.zeros(1, dtype=torch.int64)).item()
assert total == everything, total
hvd_tf.flush()
missed = np.zeros(1, np.int32)
hvd_tf.graph.runtime.core.collect(0, "bucket", missed.ctypes.data)
assert total_tf + missed[0] == everything, (total_tf, missed)
note("done")
