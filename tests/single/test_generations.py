"""Horovod that is initialised by its own `init`, and more than once."""

import pytest
from interpreter import run_apart

PROGRAM = """
import atexit, os, sys
import horovod.torch, torch
import horovod_partial.torch as hvd
from horovod_partial.torch.operations import runtime

modules = {"horovod": horovod.torch, "ours": hvd}
atexit.register(print, "the end")  # before Horovod's handler and ours


def train():
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sync="solo")
    optimizers.append(optimizer)
    step(model, optimizer)
    models.append(model)


def step(model, optimizer):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


optimizers, models, generations = [], [], [runtime.generation]
for name in sys.argv[1:]:
    modules[name].init()
    modules[name].init()  # does nothing
    os.environ["HOROVOD_ELASTIC"] = "1"  # for us: one rank alone, as an elastic job may have
    generations.append(runtime.generation)
    assert all(optimizer.rounds == 0 for optimizer in optimizers)
    for model, optimizer in zip(models, optimizers):
        step(model, optimizer)
    train()
    train()
    print(sorted(bucket.split(".", 2)[2] for bucket in hvd.partial_stats()))
    del os.environ["HOROVOD_ELASTIC"]
    if len(generations) < len(sys.argv):
        modules[name].shutdown()
        assert runtime.generation == 0
assert len(set(generations)) == len(generations)
runtime._end = lambda **_: print("delivers" if runtime.is_initialized() else "comes too late")
"""


@pytest.mark.parametrize("inits", [["horovod", "horovod"], ["ours", "horovod", "ours"]], ids="-".join)
def test_names_count_anew_in_each_generation(inits: list[str]) -> None:
    done = run_apart(PROGRAM, *inits, HOROVOD_CONTROLLER="gloo", HOROVOD_CPU_OPERATIONS="gloo")
    names = [f"{sorted(f'{number}.0' for number in range(1, 2 * count + 1))}" for count in range(1, len(inits) + 1)]
    assert done.stdout.splitlines() == [*names, "delivers", "the end"], done.stderr
