"""simple-framework's trainer with its backend for Horovod, on random pictures."""

from typing import Any

import torch
from simple_framework.trainer import SimpleFrameworkWrapper, Trainer


class Pictures(SimpleFrameworkWrapper):
    def __init__(self) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        super().__init__(model, torch.nn.CrossEntropyLoss())

    def train_step(self, batch: Any) -> Any:
        loss = self.loss_fn(self.model(batch[0]), batch[1])
        return loss, {"loss": loss.item()}

    validation_step = train_step

    def get_optimizer_scheduler(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9), None


torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(128, 16), torch.randint(0, 2, (128,)))
places = {"save_path": ".", "experiment_path": "."}
trainer = Trainer(Pictures(), {"description": None, "backbone": "Horovod", **places})
trainer.fit(data, batch_size=8, epochs=2, callbacks=[])
