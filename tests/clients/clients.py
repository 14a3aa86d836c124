"""The programs that `test_clients.py` runs, with their versions, arguments and what is expected of them."""

from pathlib import Path
from typing import NamedTuple

from sources import Archive, Commit, tree

PROGRAMS = Path(__file__).with_name("programs")

HOROVOD = Commit(
    "horovod/horovod", "1d217b59949986d025f6db93c49943fb6b6cc78f"
)  # v0.28.1, whose archive on PyPI has no examples
IGNITE = Archive("pytorch-ignite", "0.5.5", "2c14de75c939a3cc06d2e7de00b1e0a261917ef9bd874dac2e69d789dfa9cc64")
KFAC = Commit("lzhangbv/kfac_pytorch", "c45acb8fc8a47848fefcc0e665ab292184f36215")
CASPR = Commit("microsoft/CASPR", "9cdbf270487751a0ad6862b2fea2ccc0e23a0b67")
COSMOFLOW = Commit("sparticlesteve/cosmoflow-benchmark", "559eafb99ae66bbad81835d81ae4cd0402eb6119")
CT_RECON = Commit("prabhatkc/ct-recon", "b154e738a4906bd3b7c032ad1a1b2c7c654539a1")
OMNIFOLD = Commit("ViniciusMikuni/omnifold", "66b26f2ac4bbc005931df38e34e6e4e4b4b73093")

ONE_MODEL = "one model"  # all ranks end with it
TOLD = "told"  # they may differ, and then a warning at the end says so


class Client(NamedTuple):
    """A program. In `arguments`, `{data}` is the folder of the data, and `{own}` one of this run alone.

    Attributes:
        program: a file of `source`, or of `programs` without one; or `-m` and a module.
        majority: what becomes of it under Majority: `ONE_MODEL`, `TOLD`, or what the refusal says.
        fails: what Horovod itself says, if the program does not run with it.
        refusal: what ours says under Full, if it refuses the program.
        only_ours: Horovod fails, and ours runs it.
        repeats: two runs with Horovod alone give the same bits.
        library: holds what the program imports, where no package has it.
    """

    name: str
    program: str
    arguments: str = ""
    source: Archive | Commit | None = None
    framework: str = "torch"
    majority: str = TOLD
    elastic: bool = False
    transport: str = "gloo"
    fails: str = ""
    refusal: str = ""
    only_ours: bool = False
    repeats: bool = True
    library: Commit | None = None
    variables: dict[str, str] = {}  # noqa: RUF012 (a tuple's field, which nobody changes)

    def command(self) -> list[str]:
        """What `observe.py` is told to run."""
        if self.program.startswith("-m "):
            return self.program.split()
        return [str((tree(self.source) if self.source else PROGRAMS) / self.program)]

    def paths(self) -> list[str]:
        """Where the program finds its library."""
        return [str(tree(self.library))] if self.library else []


SYNTHETIC = "--model resnet18 --batch-size 1 --num-warmup-batches 1 --num-batches-per-iter 2 --num-iters 2"
IMAGES = "--train-dir {data}/train --val-dir {data}/val --batch-size 1 --val-batch-size 2 --epochs 1"
KERAS_2 = {"TF_USE_LEGACY_KERAS": "1", "CLIENT_STEPS": "4"}
CIFAR = {"CLIENT_CIFAR": "1"}
COSMOS = (
    "{data}/cosmos.yaml --distributed --data-dir {data}/cosmos --output-dir {own} --intra-threads 1 --inter-threads 1"
)

CLIENTS = [
    Client("pyro-svi", "pyro_svi.py", majority=ONE_MODEL),
    Client("lightning", "lightning_strategy.py", majority=ONE_MODEL),
    Client(
        "caspr",
        "caspr_autoencoder.py",
        majority=ONE_MODEL,
        library=CASPR,
        variables={"CLIENT_ABSENT": "imblearn imblearn.over_sampling onnx onnxruntime"},
    ),
    Client(
        "simple-framework",
        "simple_loop.py",
        fails="Gradients were computed more than backward_passes_per_step times",
        refusal="the object that hvd.DistributedOptimizer has returned was deleted",
        majority="the object that hvd.DistributedOptimizer has returned was deleted",
    ),
    Client(
        "ignite-cifar10",
        "examples/cifar10/main.py",
        "run --backend horovod --data_path {data}/cifar --output_path {own} --model resnet18 --batch_size 8 --num_epochs 2 "
        "--num_warmup_epochs 1 --num_workers 0",
        IGNITE,
        variables=CIFAR,
    ),
    Client(
        "open-clip",
        "-m open_clip_train.main",
        "--horovod --train-data '{data}/{{0..1}}.tar' --dataset-type webdataset --train-num-samples 8 --model ViT-S-32 "
        "--batch-size 2 --epochs 1 --workers 1 --device cpu --precision fp32 --logs {own} --name run",
        repeats=False,
    ),
    Client(
        "kfac-cifar10",
        "examples/pytorch_cifar10_resnet.py",
        "--dir {data}/cifar --log-dir {own} --model resnet20 --batch-size 8 --test-batch-size 8 --epochs 1 --kfac-update-freq 1",
        KFAC,
        library=KFAC,
        variables=CIFAR,
    ),
    Client(
        "ct-recon-gan",
        "DLdenoise/main_gan_hvd.py",
        "--training-fname {data}/scans.h5 --validating-fname {data}/scans.h5 --descriptor-type made --batch-size 8 "
        "--val-batch-size 8 --nepochs 2 --base-lr 1e-3 --shuffle_patches --save_log_ckpts",
        CT_RECON,
        majority="But a rank was late",  # it throws the generator's gradients of the other loss away, after synchronize()
        variables={"CLIENT_ABSENT": "cv2 imageio natsort pydicom tensorboardX"},
    ),
    Client(
        "cosmoflow",
        "train.py",
        COSMOS,
        COSMOFLOW,
        "tensorflow",
        majority="optimizer must be one of Keras 3",
        variables={"TF_USE_LEGACY_KERAS": "1", "CLIENT_ABSENT": "wandb"},
    ),
    Client(
        "cosmoflow-keras3",
        "train.py",
        COSMOS,
        COSMOFLOW,
        "tensorflow",
        fails="'Variable' object has no attribute 'ref'",
        only_ours=True,
        majority=ONE_MODEL,
        variables={"CLIENT_ABSENT": "wandb"},
    ),
    Client(
        "omnifold",
        "omnifold_events.py",
        framework="tensorflow",
        majority="optimizer must be one of Keras 3",
        library=OMNIFOLD,
        variables={"TF_USE_LEGACY_KERAS": "1"},
    ),
    Client(
        "omnifold-keras3",
        "omnifold_events.py",
        framework="tensorflow",
        fails="Could not locate class 'Adam'",
        only_ours=True,
        majority=ONE_MODEL,
        library=OMNIFOLD,
    ),
    Client(
        "deepmd-kit",
        "-m deepmd",
        "--tf train {data}/water.json",
        framework="",
        majority="Majority() needs an optimizer of Keras; one of tf.compat.v1.train takes hvd.Full()",
        variables={"CLIENT_OUTCOME": "lcurve.out"},
    ),
    Client(
        "pytorch-mnist",
        "examples/pytorch/pytorch_mnist.py",
        "--data-dir {data} --epochs 2 --batch-size 16",
        HOROVOD,
    ),
    Client(
        "pytorch-mnist-adasum",
        "examples/pytorch/pytorch_mnist.py",
        "--data-dir {data} --epochs 1 --batch-size 16 --use-adasum",
        HOROVOD,
        majority="partial collectives reduce with op=hvd.Average or hvd.Sum",
        transport="mpi",  # Gloo has no Adasum
    ),
    Client("pytorch-synthetic", "examples/pytorch/pytorch_synthetic_benchmark.py", SYNTHETIC, HOROVOD),
    Client("pytorch-imagenet", "examples/pytorch/pytorch_imagenet_resnet50.py", IMAGES, HOROVOD),
    Client(
        "elastic-pytorch-mnist",
        "examples/elastic/pytorch/pytorch_mnist_elastic.py",
        "--data-dir {data} --epochs 1 --batch-size 32",
        HOROVOD,
        elastic=True,
    ),
    Client(
        "elastic-pytorch-synthetic",
        "examples/elastic/pytorch/pytorch_synthetic_benchmark_elastic.py",
        SYNTHETIC,
        HOROVOD,
        elastic=True,
    ),
    Client(
        "tensorflow2-mnist", "examples/tensorflow2/tensorflow2_mnist.py", "", HOROVOD, "tensorflow", variables=KERAS_2
    ),
    Client(
        "tensorflow2-synthetic",
        "examples/tensorflow2/tensorflow2_synthetic_benchmark.py",
        "--model MobileNet --batch-size 1 --num-warmup-batches 1 --num-batches-per-iter 2 --num-iters 2",
        HOROVOD,
        "tensorflow",
        variables=KERAS_2,
    ),
    Client(
        "tensorflow2-keras-mnist",
        "examples/tensorflow2/tensorflow2_keras_mnist.py",
        "",
        HOROVOD,
        "tensorflow",
        majority="optimizer must be one of Keras 3",
        fails="has no attribute 'get_value'",
        refusal="has no attribute 'get_value'",
        variables=KERAS_2,
    ),
    Client(
        "elastic-tensorflow2-mnist",
        "examples/elastic/tensorflow2/tensorflow2_mnist_elastic.py",
        "",
        HOROVOD,
        "tensorflow",
        elastic=True,
        majority="optimizer must be one of Keras 3",
        variables=KERAS_2,
    ),
    Client(
        "elastic-tensorflow2-mnist-keras3",
        "examples/elastic/tensorflow2/tensorflow2_mnist_elastic.py",
        "",
        HOROVOD,
        "tensorflow",
        elastic=True,
        fails="'list' object is not callable",
        only_ours=True,
        variables={"CLIENT_STEPS": "4"},
    ),
]
