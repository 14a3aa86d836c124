"""The programs that `test_clients.py` runs, with their versions, arguments and what is expected of them."""

from pathlib import Path
from typing import NamedTuple

from sources import Archive, Commit

HOROVOD = Commit(
    "horovod/horovod", "1d217b59949986d025f6db93c49943fb6b6cc78f"
)  # v0.28.1, whose archive on PyPI has no examples
IGNITE = Archive("pytorch-ignite", "0.5.5", "2c14de75c939a3cc06d2e7de00b1e0a261917ef9bd874dac2e69d789dfa9cc64")

ONE_MODEL = "one model"  # all ranks end with it
TOLD = "told"  # they may differ, and then a warning at the end says so


class Client(NamedTuple):
    """A program. In `arguments`, `{data}` is the folder of the data, and `{own}` one of this run alone.

    Attributes:
        program: a file of `source`, or of `programs` without one; or `-m` and a module.
        majority: what becomes of it under Majority: `ONE_MODEL`, `TOLD`, or what the refusal says.
        fails: what Horovod itself says, if the program does not run with it.
        refusal: what ours says under Full, if Horovod's failure is told in other words.
    """

    name: str
    program: str
    arguments: str = ""
    source: Archive | Commit | None = None
    framework: str = "torch"
    majority: str = TOLD
    elastic: bool = False
    fails: str = ""
    refusal: str = ""
    variables: dict[str, str] = {}  # noqa: RUF012 (a tuple's field, which nobody changes)

    def command(self, folder: Path) -> list[str]:
        """What `observe.py` is told to run."""
        if self.program.startswith("-m "):
            return self.program.split()
        return [str(folder / self.program)]


SYNTHETIC = "--model resnet18 --batch-size 1 --num-warmup-batches 1 --num-batches-per-iter 2 --num-iters 2"
IMAGES = "--train-dir {data}/train --val-dir {data}/val --batch-size 1 --val-batch-size 2 --epochs 1"

CLIENTS = [
    Client("pyro-svi", "pyro_svi.py", majority=ONE_MODEL),
    Client("lightning", "lightning_strategy.py", majority=ONE_MODEL),
    Client(
        "pytorch-mnist",
        "examples/pytorch/pytorch_mnist.py",
        "--data-dir {data} --epochs 2 --batch-size 16",
        HOROVOD,
    ),
    Client("pytorch-synthetic", "examples/pytorch/pytorch_synthetic_benchmark.py", SYNTHETIC, HOROVOD),
    Client("pytorch-imagenet", "examples/pytorch/pytorch_imagenet_resnet50.py", IMAGES, HOROVOD),
]
