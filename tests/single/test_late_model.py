"""`benchmarks/late_model.py`: rounds in simulated time."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils import parameters_to_vector

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import late_model


def test_a_late_gradient_is_computed_with_the_model_of_its_step() -> None:
    trainer = late_model.Trainer(late_model.Arm(), rate=0.01, steps=2, words_of_batch=8.0, seed=0)
    first = parameters_to_vector(trainer.model.parameters()).detach().clone()
    used = []
    loss_of = trainer.model.loss

    def loss(batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
        used.append(parameters_to_vector(trainer.model.parameters()).detach().clone())
        return loss_of(batch)

    trainer.model.loss = loss  # type: ignore[method-assign]
    batches = [[[torch.tensor([2, 5, 7 + rank, 2])] for rank in range(2)] for _ in range(2)]
    # Rank 1 computes its first gradient with the first model, and is in the second round.
    rounds = late_model.Rounds(round_of=np.array([[0, 1], [1, 1]]), model_of=np.array([[0, 0], [1, 1]]), seconds=0.0)
    trainer.train(batches, rounds)
    of_first = [torch.equal(model, first) for model in used]
    assert of_first == [True, True, False, False]
