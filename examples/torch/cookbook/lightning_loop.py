"""Lightning: one device per process, the optimizer wrapped where it is made, and flushes before validation and saving.

Clip by `max_grad_norm=` of the wrapper, not by `gradient_clip_val=` of the trainer, which knows nothing of rounds.
"""

from __future__ import annotations

import sys

import lightning
import torch
from data import Batch, batches, network
from lightning.pytorch.plugins.environments import LightningEnvironment

import horovod_partial.torch as hvd


class Digits(lightning.LightningModule):
    def __init__(self, sync: str) -> None:
        super().__init__()
        self.network = network()
        self.sync = sync

    def training_step(self, batch: Batch, _: int) -> torch.Tensor:
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.network(images), labels)

    def validation_step(self, batch: Batch, _: int) -> None:
        images, labels = batch
        hits = (self.network(images).argmax(1) == labels).float().mean()
        self.log("accuracy", hvd.allreduce(hits, name="accuracy"))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        bare = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return hvd.DistributedOptimizer(bare, self.named_parameters(), sync=self.sync, max_grad_norm=1.0)

    def on_validation_start(self) -> None:
        self.optimizers(use_pl_optimizer=False).flush()

    on_train_epoch_end = on_validation_start  # before Lightning saves


def train(sync: str = "majority", steps: int = 20) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = Digits(sync)
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        plugins=LightningEnvironment(),  # the ranks are Horovod's: Lightning is not to look for those of MPI or Slurm
        **dict.fromkeys(off, False),
    )
    loader = torch.utils.data.DataLoader(list(batches(steps // 2)), batch_size=None)
    trainer.fit(model, loader, loader)
    return model, trainer.optimizers[0]


if __name__ == "__main__":
    hvd.init()
    hvd.assert_replicas_equal(*train(*sys.argv[1:2]))
