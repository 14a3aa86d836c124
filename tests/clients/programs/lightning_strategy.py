"""PyTorch Lightning 1.9.5 with its own strategy for Horovod, and its own model for demonstrations."""

from pytorch_lightning import Trainer
from pytorch_lightning.demos.boring_classes import BoringModel

trainer = Trainer(strategy="horovod", accelerator="cpu", max_epochs=2, limit_train_batches=8, limit_val_batches=2)
trainer.fit(BoringModel())
