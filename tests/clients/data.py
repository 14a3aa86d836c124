"""Small data for the programs, in the formats that they read, made from random numbers of a fixed seed."""

import io
import json
import pickle
import struct
import tarfile
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from PIL import Image

TRAIN, TEST = 256, 64


def make(folder: Path) -> None:
    """Make the data of all programs."""
    random = np.random.default_rng(0)

    def pictures(count: int, *shape: int) -> npt.NDArray[np.uint8]:
        return random.integers(0, 256, (count, *shape), dtype=np.uint8)

    def labels(count: int) -> npt.NDArray[np.uint8]:
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
            # The same picture each time: webdataset draws their order by the time of day.
            picture = (folder / "train" / kind / "0.png").read_bytes()
            for number in range(4):
                for name, stored in ((f"{number}.png", picture), (f"{number}.txt", b"a picture")):
                    entry = tarfile.TarInfo(name)
                    entry.size = len(stored)
                    archive.addfile(entry, io.BytesIO(stored))
    # Water as DeePMD-kit reads it, with what it is told.
    systems = folder / "water"
    frames = systems / "set.000"
    frames.mkdir(parents=True)
    (systems / "type.raw").write_text("0\n1\n1\n")
    (systems / "type_map.raw").write_text("O\nH\n")
    np.save(frames / "coord.npy", np.array([0, 0, 0, 1, 0, 0, 0, 1, 0]) + 0.1 * random.standard_normal((16, 9)))
    np.save(frames / "box.npy", np.tile(10 * np.eye(3).reshape(9), (16, 1)))
    np.save(frames / "energy.npy", random.standard_normal(16))
    np.save(frames / "force.npy", random.standard_normal((16, 9)))
    descriptor = {
        "type": "se_e2_a",
        "sel": [4, 8],
        "rcut_smth": 0.5,
        "rcut": 4.0,
        "neuron": [4, 8],
        "axis_neuron": 2,
        "seed": 1,
    }
    training = {
        "training_data": {"systems": [str(systems)], "batch_size": 4},
        "numb_steps": 10,
        "seed": 10,
        "disp_freq": 1,
    }
    told = {
        "model": {"type_map": ["O", "H"], "descriptor": descriptor, "fitting_net": {"neuron": [8, 8], "seed": 1}},
        "learning_rate": {"type": "exp", "start_lr": 0.001, "stop_lr": 1e-5, "decay_steps": 10},
        "loss": {"type": "ener", "start_pref_e": 1, "limit_pref_e": 1, "start_pref_f": 1, "limit_pref_f": 1},
        "training": training,
    }
    (folder / "water.json").write_text(json.dumps(told))
    # Scans with noise, and without.
    clean = random.random((32, 1, 16, 16), np.float32)
    with h5py.File(folder / "scans.h5", "w") as scans:
        scans["input"], scans["target"] = clean + 0.1 * random.standard_normal(clean.shape, np.float32), clean
    # Universes, each with the four numbers that made it, and what CosmoFlow is told.
    shape = [16, 16, 16, 4]
    for part, count in (("train", 16), ("validation", 8)):
        (folder / "cosmos" / part).mkdir(parents=True)
        for number in range(count):
            matter = tf.train.BytesList(value=[random.integers(100, size=shape, dtype=np.int16).tobytes()])
            origin = tf.train.FloatList(value=random.uniform(-1, 1, 4))
            feature = {"x": tf.train.Feature(bytes_list=matter), "y": tf.train.Feature(float_list=origin)}
            with tf.io.TFRecordWriter(str(folder / "cosmos" / part / f"{number:02}.tfrecord")) as records:
                records.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    told = {
        "data": {"name": "cosmo", "sample_shape": shape, "n_train": 16, "n_valid": 8, "batch_size": 2, "n_epochs": 6},
        "model": {"name": "cosmoflow", "input_shape": shape, "target_size": 4, "conv_size": 4, "n_conv_layers": 2},
        "optimizer": {"name": "SGD", "momentum": 0.9},
        "lr_schedule": {"base_lr": 0.01, "scaling": "linear", "base_batch_size": 2, "n_warmup_epochs": 2},
        "train": {"loss": "mse", "metrics": ["mean_absolute_error"], "early_stopping_patience": 2},
    }
    (folder / "cosmos.yaml").write_text(json.dumps(told))
