"""One rank under every policy: what it contributes must come back bit for bit, and training must be that of one process.

    .venv/bin/python tests/parallel/programs/every_policy.py [--device cuda] [--steps N]

Without other ranks no round is late. tools/gpu_check.py runs this on a GPU, and under compute-sanitizer.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch

import horovod_partial.torch as hvd

ROUNDS = ["solo", "majority", "majority:random", "quorum:1.0"]
MODELS = ["group_average:2", "partial_reduce:2", "weighted_average:1,0.9"]
DTYPES = [torch.int32, torch.int64, torch.float16, torch.float32, torch.float64, torch.bfloat16]
SHAPES = [(), (0,), (1,), (1023,), (3, 5, 7), (1 << 20,)]
AVERAGES: list[dict[str, Any]] = [
    {"policy": hvd.GroupAverage()},
    {"policy": hvd.PartialReduce(2)},
    {"policy": hvd.WeightedAverage(1, 0.9), "steps": 3},
]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "buckets": {"groups": 3},
    "merged": {"merging": hvd.MergedGradients()},
}


def check_operations(steps: int) -> None:
    for dtype in DTYPES:
        for shape in SHAPES:
            for sync in ROUNDS:
                # Integers are summed only. One rank's sum is its average.
                operation = {} if dtype.is_floating_point else {"op": hvd.Sum}
                check("partial_allreduce", dtype, shape, steps, {"sync": sync, **operation})
            if dtype.is_floating_point:
                for options in AVERAGES:
                    check("average", dtype, shape, steps, options)


def check(kind: str, dtype: torch.dtype, shape: tuple[int, ...], steps: int, options: dict[str, Any]) -> None:
    """Out of place and, where there is such a form, in place, with new numbers in each step."""
    name = f"{kind} {options} {dtype} {shape}"
    for step in range(steps):
        tensor = (1000 * torch.randn(shape)).to(dtype)
        before = tensor.clone()
        result = getattr(hvd, kind)(tensor, name=name, **options)
        assert torch.equal(result, before), f"{name}, step {step}"
        assert torch.equal(tensor, before), f"{name}, step {step}: the tensor has changed"
        if kind == "average":
            continue
        in_place = getattr(hvd, f"{kind}_")(tensor, name=name, **options)
        assert in_place.data_ptr() == tensor.data_ptr()
        assert torch.equal(tensor, before), f"{name}, step {step}, in place"


def check_optimizers(steps: int) -> None:
    for make in OPTIMIZERS:
        expected = train(make, steps)
        for sync in ["full", *ROUNDS, *MODELS]:
            for option, options in OPTIONS.items():
                if sync in ROUNDS or not options:
                    assert train(make, steps, sync=sync, **options) == expected, f"{make}, {sync}, {option}"


def train(make: str, steps: int, **options: Any) -> list[float]:
    """The weights after some steps; with Horovod if there are options."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.Tanh(), torch.nn.Linear(300, 10))
    optimizer: Any = OPTIMIZERS[make](model.parameters())
    if options:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
    if options:
        optimizer.flush()
    return [number for parameter in model.parameters() for number in parameter.flatten().tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    torch.set_default_device(options.device)
    hvd.init()
    assert hvd.size() == 1, "more ranks would bring numbers of their own"
    check_operations(options.steps)
    print("operations: every contribution came back", flush=True)
    check_optimizers(options.steps)
    print("optimizers: every training is that of one process", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
