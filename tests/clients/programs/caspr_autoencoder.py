"""CASPR's autoencoder in its training for Horovod, on made records of customers: two schedules, early stopping, the best model."""

import numpy as np
import pandas as pd
import torch
from caspr.data.load import init_datasets
from caspr.models.factory import TRANSFORMER, CASPRFactory
from caspr.utils.horovod.train import train_val_hvd

CUSTOMERS, VISITS = 128, 5
SHOPS, REGIONS = 6, 4

random = np.random.default_rng(0)
spent = random.standard_normal((CUSTOMERS, VISITS)).cumsum(axis=1)
shops = random.integers(SHOPS, size=(CUSTOMERS, VISITS))
table = pd.DataFrame(
    {f"spent_{visit}": spent[:, visit] for visit in range(VISITS)}
    | {f"shop_{visit}": shops[:, visit] for visit in range(VISITS)}
    | {
        "age": random.standard_normal(CUSTOMERS),
        "region": random.integers(REGIONS, size=CUSTOMERS),
        "stays": spent[:, -1] > 0,
    }
)
visited = [f"{name}_{visit}" for name in ("spent", "shop") for visit in range(VISITS)]
numbers = [name for name in table if name.startswith(("spent", "age"))]
kinds = [name for name in table if name.startswith(("shop", "region"))]
datasets = init_datasets(table, visited, ["age", "region"], ["stays"], kinds, numbers, VISITS, test_ratio=0.25, seed=0)
factory = CASPRFactory(
    ["shop", "region"],
    {"shop": SHOPS, "region": REGIONS},
    ["spent", "age"],
    ["spent", "shop"],
    ["age", "region"],
    seq_len=VISITS,
)
model = factory.create(TRANSFORMER, device="cpu", HIDDEN_SIZE=16, NUM_LAYERS_ENC=1, NUM_LAYERS_DEC=1)
train_val_hvd(*datasets, model, torch.device("cpu"), batch_size=16, epochs=30, learning_rate=0.02, warmup_epochs=3)
