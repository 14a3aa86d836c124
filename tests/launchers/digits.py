"""The job that every launcher starts: digits under Majority, on four ranks of which one is slow.

    python digits.py RESULT.json

Rank 0 writes what `train` returns.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

RANKS = 4
EPOCHS = 40
SLOW_RANK = 1
DELAY_SECONDS = 0.002  # of the slow rank, in each step


def train() -> dict[str, Any]:
    """Train on this rank's share of the digits. Everything is imported here: Ray and Spark send this function to their workers.

    Returns:
        The accuracy of the one model on the test set, this rank and the number of ranks, the policy's text, the
        rounds that have closed, and in how many of them each rank was late.
    """
    import torch
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    import horovod_partial.torch as hvd
    from horovod_partial.settings import settings

    hvd.init()
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    images, test_images, labels, test_labels = train_test_split(images / 16, labels, random_state=0, stratify=labels)
    images, labels = (torch.tensor(of_all[hvd.rank() :: hvd.size()]) for of_all in (images, labels))

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())  # the policy is that of the environment
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(images)).split(16):
            time.sleep(DELAY_SECONDS * (hvd.rank() == SLOW_RANK))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[batch].float()), labels[batch]).backward()
            optimizer.step()
    optimizer.flush()

    correct = model(torch.tensor(test_images).float()).argmax(1) == torch.tensor(test_labels)
    accuracy = hvd.allreduce(correct.float().mean(), name="accuracy").item()
    (stats,) = hvd.partial_stats().values()
    result = {
        "accuracy": accuracy,
        "rank": hvd.rank(),
        "ranks": hvd.size(),
        "sync": settings().sync,
        "rounds": optimizer.rounds,
        "late": stats["late"],
    }
    hvd.shutdown()
    return result


if __name__ == "__main__":
    result = train()
    if result["rank"] == 0:
        Path(sys.argv[1]).write_text(json.dumps(result))
