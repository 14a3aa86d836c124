"""Trains two epochs in an elastic job under `hvd.WorkSharing()`.

A sample's gradient is 1 in the weight of its number, so the weights tell how often each sample is in an update. The rank on
the host 127.0.0.1, as the job calls it, kills itself in the first epoch.
"""

import os
import signal
import time
from typing import Any

import torch
from common import note
from torch.utils.data import DataLoader

import horovod_partial.torch as hvd
from horovod_partial.torch.dynamic_sharding import DynamicShardingLoader, DynamicShardingSampler

PASSES, BATCH_SIZE, SAMPLES, EPOCHS = 2, 2, 96, 2

torch.set_num_threads(1)
hvd.init()
counts = torch.nn.ParameterList([torch.zeros(SAMPLES)])
optimizer: Any = hvd.DistributedOptimizer(
    torch.optim.SGD(counts.parameters(), lr=1.0), op=hvd.Sum, backward_passes_per_step=PASSES, sync="work_sharing"
)
sampler = DynamicShardingSampler(SAMPLES, BATCH_SIZE, PASSES)
data: Any = DataLoader(list(range(SAMPLES)), batch_sampler=sampler, num_workers=1)  # type: ignore[arg-type]
loader = DynamicShardingLoader(data, optimizer)
state: Any = hvd.elastic.TorchState(model=counts, optimizer=optimizer, sampler=sampler, samples=0)


def after_update(_: object) -> None:
    """Commit now and then, or only look whether hosts have come: where updates of 8 and of 12 samples both end the epoch.

    Nobody asks the sampler for its place in between.
    """
    state.samples += PASSES * BATCH_SIZE * hvd.size()
    if state.samples % 48 == 0:
        state.commit()
    elif state.samples % 24 == 0:
        state.check_host_updates()


optimizer.register_round_hook(after_update)


@hvd.elastic.run
def train(state: Any) -> None:
    for epoch in range(sampler.epoch, EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            (-counts[0][batch].sum()).backward()
            if state.samples == 3 * PASSES * BATCH_SIZE * hvd.size():
                note("running")
                if os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1":
                    os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            time.sleep(0.1 + 0.05 * hvd.rank())
    optimizer.flush()


train(state)
hvd.assert_replicas_equal(counts, optimizer)
note("ended", f"{hvd.size()} {counts[0].unique().tolist()}")
