"""Small data for the programs, in the formats that they read, made from random numbers of a fixed seed."""

import io
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

TRAIN, TEST = 256, 64


def make(folder: Path) -> None:
    """Make the data of all programs."""
    random = np.random.default_rng(0)

    def pictures(count: int, *shape: int) -> np.ndarray:
        return random.integers(0, 256, (count, *shape), dtype=np.uint8)

    def labels(count: int) -> np.ndarray:
        return random.integers(0, 10, count, dtype=np.uint8)

    # Digits as torchvision reads them, and as Keras does.
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, count in (("train", TRAIN), ("t10k", TEST)):
        (raw / f"{name}-images-idx3-ubyte").write_bytes(
            struct.pack(">IIII", 2051, count, 28, 28) + pictures(count, 28, 28).tobytes()
        )
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels(count).tobytes())
    train, test = (pictures(TRAIN, 28, 28), labels(TRAIN)), (pictures(TEST, 28, 28), labels(TEST))
    np.savez(folder / "mnist.npz", x_train=train[0], y_train=train[1], x_test=test[0], y_test=test[1])
    # Small pictures as in CIFAR-10.
    batches = folder / "cifar" / "cifar-10-batches-py"
    batches.mkdir(parents=True)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        batch = {"data": pictures(16, 3072), "labels": labels(16).tolist()}
        (batches / name).write_bytes(pickle.dumps(batch))
    (batches / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    # Pictures in a folder for each class, and with captions in two archives.
    for part in ("train", "val"):
        for kind in "ab":
            (folder / part / kind).mkdir(parents=True)
            for number, picture in enumerate(pictures(4, 40, 40, 3)):
                Image.fromarray(picture).save(folder / part / kind / f"{number}.png")
    for shard, kind in enumerate("ab"):
        with tarfile.open(folder / f"{shard}.tar", "w") as archive:
            for file in sorted((folder / "train" / kind).iterdir()):
                for name, content in ((file.name, file.read_bytes()), (f"{file.stem}.txt", b"a picture")):
                    entry = tarfile.TarInfo(name)
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))
