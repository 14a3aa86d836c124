"""`shutdown`, then `init`: a new generation, in which nothing of the old one is left."""

import torch
from common import RANK, note

import horovod_partial.torch as hvd

torch.set_num_threads(1)
torch.manual_seed(0)
results, plans = [], []
hvd.init()
model = torch.nn.Linear(3, 1)
merged = hvd.MergedGradients(rule="wait_free", warmup_steps=2, replan_every=None)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), sync="majority", merging=merged)
for generation in range(2):
    if generation == 1:
        hvd.init()
    for _ in range(5):
        hvd.partial_allreduce(torch.tensor([float(RANK)]), name="bucket", op=hvd.Sum, sync="solo")
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        plans.append(optimizer.merging_plan is not None)  # gradients are measured anew in each generation
    if generation == 0:
        # Another shape: were the declaration of the old generation still there, this would be refused below.
        handle = hvd.partial_allreduce_async(torch.ones(3), name="other", op=hvd.Sum, sync="quorum:1.0")
        results.append(hvd.synchronize(handle).tolist())
    else:
        result = hvd.partial_allreduce(torch.ones(2, 2), name="other", op=hvd.Sum, sync="quorum:1.0")
        results.append(result.reshape(-1).tolist())
        assert {"bucket", "other"} == {name for name in hvd.partial_stats() if "Optimizer" not in name}
    hvd.flush()
    hvd.shutdown()
note("results", repr(results))
note("plans", repr(plans))
