"""Ranks with unequal shares of the data: some have more batches than others, and one stops early.

    horovodrun -np 4 python examples/torch/uneven.py

Horovod's own optimizer would hang here: it needs every rank in every step. A round of a partial policy counts only the
ranks that still train. A rank whose data are used up goes on to `flush()`, where it waits for the others and then gets
all that it has missed. Rank 0 meanwhile tests its model now and then, and is late for the rounds that pass.
"""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import horovod_partial.torch as hvd

EPOCHS = 12
PATIENT_LOSS = 0.15  # the last rank stops after an epoch with a smaller mean loss


def test(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """The share of the images that the model recognises."""
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def main() -> None:
    hvd.init()
    torch.manual_seed(0)
    rank, size = hvd.rank(), hvd.size()

    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    images, test_images, labels, test_labels = train_test_split(images, labels, random_state=0, stratify=labels)
    # Rank r gets r + 1 parts of the data.
    parts = [len(images) * (r + 1) // (size * (size + 1) // 2) for r in range(size)]
    parts[-1] += len(images) - sum(parts)
    images, labels = images.split(parts)[rank], labels.split(parts)[rank]

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), sync=hvd.Majority())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    steps = 0
    for epoch in range(EPOCHS):
        losses = []
        for batch in torch.randperm(len(images)).split(16):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            steps += 1
        if rank == 0 and epoch % 4 == 0:  # alone: no rank waits for this one
            print(f"epoch {epoch} of rank 0: test accuracy {test(model, test_images, test_labels):.1%}", flush=True)
        if rank == size - 1 and sum(losses) / len(losses) < PATIENT_LOSS:
            print(f"rank {rank} stops early, after epoch {epoch}", flush=True)
            break
    print(f"rank {rank} has taken {steps} steps", flush=True)

    optimizer.flush()  # waits until every rank is here; then all have applied every round
    accuracy = hvd.allreduce(torch.tensor(test(model, test_images, test_labels)), name="accuracy")
    if rank == 0:
        print(f"test accuracy {accuracy:.1%} after {optimizer.rounds} rounds", flush=True)


if __name__ == "__main__":
    main()
