"""Four epochs with a schedule: saves after each, and goes on from what is saved. The end of the first life is a requeue."""

import os
import time
from pathlib import Path

import torch

import horovod_partial.torch as hvd

PATH = Path("checkpoint.pt")
EPOCHS, STEPS = 4, 10

hvd.init()
model = torch.nn.Linear(3, 1)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), sync="majority"
)
scheduler = hvd.follow_rounds(torch.optim.lr_scheduler.StepLR(optimizer, STEPS, gamma=0.5))
begin = 0
if PATH.exists():
    checkpoint = torch.load(PATH)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"])
    begin = checkpoint["epoch"]
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
if hvd.rank() == 0:
    print(f"begins at epoch {begin}", flush=True)
for epoch in range(begin + 1, EPOCHS + 1):
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(16, 3)).square().mean().backward()
        optimizer.step()
    optimizer.flush()
    hvd.save_checkpoint(PATH, model, optimizer, scheduler=scheduler, epoch=epoch)
    hvd.assert_replicas_equal(model, optimizer)
    if hvd.rank() == 0:
        print(f"epoch {epoch} of {EPOCHS}, rate {scheduler.get_last_lr()[0]:.5f}", flush=True)
    if epoch == 1 and "SLURM_RESTART_COUNT" not in os.environ:
        time.sleep(600)
