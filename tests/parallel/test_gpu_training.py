"""What users of GPUs do in PyTorch, with one late rank: after a flush every rank has the same model, bit for bit.

What needs no GPU runs on the CPU too. `make test-gpu-double` runs that, and what needs a device, on the double of one. What
needs CUDA itself runs with `--device=cuda` alone. No test here has "eager" or "graph" in its name: tools/gpu_check.py takes
those for TensorFlow's, and leaves them out.
"""

import ctypes
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import pytest
import torch
from harness.matrix import OVER_MPI, STEADY, scripted
from harness.torch_training import batch, take_step, weights
from harness.trainers import EVERYBODY
from harness.whole_jobs import Job
from harness.world import World

import horovod_partial
import horovod_partial.torch as hvd
from horovod_partial.torch import devices, operations

HOST = -1
STEPS = 8
BYTES = 256 << 20  # of the bucket for which the GPU of programs/full_gpu.py has no memory left
CYCLES = 5_000_000  # of a GPU, some milliseconds, in which Python runs ahead of it
CYCLES_A_SECOND = 1.5e9  # of a GPU, about

pytestmark = [scripted, pytest.mark.launch(**OVER_MPI)]  # a transport sees nothing of all this

# Conditions in quotation marks know the options, in the process that asks for the outcome as well as on the ranks.
on_cuda = pytest.mark.skipif("config.getoption('device') == 'cpu'", reason="needs CUDA (--device=cuda)")
on_a_device = pytest.mark.skipif(
    "config.getoption('device') == 'cpu' and devices.device_number(torch.device('cpu')) == HOST",
    reason="needs a GPU (--device=cuda), or the double of one",
)
compiler = pytest.mark.skipif(
    "config.getoption('device') == 'cpu' and devices.device_number(torch.device('cpu')) == HOST"
    " and config.getoption('matrix') == 'default'",
    reason="on the CPU in `make test-all` alone: to import the compiler takes each rank many seconds",
)
policies = pytest.mark.parametrize("policy", ["solo", "majority", EVERYBODY])
late_or_equal = pytest.mark.parametrize("policy", ["solo", EVERYBODY])


def device_type() -> str:
    """Where the tensors of these tests lie, by PyTorch's name: the double's lie on the host."""
    return torch.get_default_device().type


Backward = Callable[[torch.Tensor, torch.Tensor], None]


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def wrap(model: torch.nn.Module, policy: str, make: Callable[..., Any] | None = None, **options: Any) -> Any:
    """The distributed form of an optimizer of the model, which is SGD with momentum if none is asked for."""
    parameters = list(model.parameters())
    optimizer = make(parameters) if make else torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), sync=policy, **options)


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x).float() - y).square().mean()


def with_a_late_rank(world: World, policy: str) -> Iterator[int]:
    """The numbers of the steps. A policy that waits for few leaves the last rank three rounds behind, others wait for it."""
    late = world.rank == world.size - 1
    for number in range(STEPS):
        if late and number == 2:
            if policy in ("solo", "majority"):
                world.wait_for("rank 0 is ahead")
            time.sleep(0.01)
        yield number
        if world.rank == 0 and number == 4:
            world.tell("rank 0 is ahead")


def check(world: World, policy: str, model: torch.nn.Module, optimizer: Any) -> list[float]:
    """There is one model after a flush, although the last rank was late. Returns its weights."""
    optimizer.flush()
    hvd.assert_replicas_equal(model, optimizer)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    if policy in ("solo", "majority"):
        stats = hvd.partial_stats()
        assert all(stats[bucket.name]["late"][world.size - 1] >= 3 for bucket in optimizer._exchange.buckets)
    return weights(model)


def train(
    world: World,
    policy: str,
    model: torch.nn.Module,
    make: Callable[..., Any] | None = None,
    backward: Backward | None = None,
) -> list[float]:
    """Train in the plainest loop, and check what has become of the model. Returns its weights.

    Args:
        make: makes the optimizer, as in `wrap`.
        backward: both passes, if they are other ones than the model's own.
    """
    optimizer = wrap(model, policy, make)
    for number in with_a_late_rank(world, policy):
        optimizer.zero_grad()
        (backward or (lambda x, y: loss_of(model, x, y).backward()))(*batch(world.rank, number))
        optimizer.step()
    return check(world, policy, model, optimizer)


def train_plainly(world: World) -> list[float]:
    """The weights to which every other form of the same training comes, if all ranks wait for each other."""
    return train(world, EVERYBODY, make_model())


def set_gradients(parameters: Sequence[torch.nn.Parameter], gradients: Sequence[torch.Tensor]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


# --- Everywhere -------------------------------------------------------------------------------------------------------

# The default backend compiles with Triton, which is there for GPUs only. In its other mode it captures graphs itself.
BACKENDS: dict[str, dict[str, Any]] = {
    "aot": {"backend": "aot_eager"},
    "inductor": {"backend": "inductor"},
    "reduce-overhead": {"backend": "inductor", "mode": "reduce-overhead"},
}


@compiler
@pytest.mark.launch(ranks=(2,))
@pytest.mark.parametrize(
    ("backend", "policy"),
    [
        ("aot", "full"),
        ("aot", "solo"),
        ("aot", EVERYBODY),
        pytest.param("inductor", EVERYBODY, marks=on_cuda),
        pytest.param("inductor", "solo", marks=on_cuda),
        pytest.param("reduce-overhead", "solo", marks=on_cuda),
    ],
)
def test_a_compiled_model(world: World, backend: str, policy: str) -> None:
    if backend != "aot":
        pytest.importorskip("triton")

    def run(compiled: bool) -> list[float]:
        model = make_model()
        forward = torch.compile(model, fullgraph=True, **BACKENDS[backend]) if compiled else model
        return train(
            world,
            policy,
            model,
            lambda parameters: torch.optim.Adam(parameters, lr=0.01),
            lambda x, y: loss_of(forward, x, y).backward(),
        )

    torch.compiler.reset()  # what an earlier test has compiled counts against how often one function may be
    compiled = run(True)
    if policy in ("full", EVERYBODY):
        assert compiled == pytest.approx(run(False), abs=0.0 if device_type() == "cpu" else 1e-4)


@policies
@pytest.mark.parametrize("fused", [False, True])
def test_channels_last(world: World, policy: str, fused: bool) -> None:
    """Images and filters lie in memory with their channels last, and so do gradients while they travel."""

    def run(memory_format: torch.memory_format) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3),
            torch.nn.Tanh(),
            torch.nn.Conv2d(8, 4, 3),
            torch.nn.Flatten(),
            torch.nn.Linear(4 * 4 * 4, 2),
        ).to(memory_format=memory_format)
        optimizer = wrap(model, policy, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=fused))
        filters = [parameter for parameter in model.parameters() if parameter.dim() == 4]
        for number in with_a_late_rank(world, policy):
            x, y = batch(world.rank, number, (4, 3, 8, 8), (4, 2))
            optimizer.zero_grad()
            loss_of(model, x.contiguous(memory_format=memory_format), y).backward()
            assert all(p.grad.is_contiguous(memory_format=memory_format) for p in filters)
            optimizer.step()
        assert all(p.is_contiguous(memory_format=memory_format) for p in filters)
        return check(world, policy, model, optimizer)

    result = run(torch.channels_last)
    if policy == EVERYBODY:
        # A GPU has other algorithms for each format, which round to fewer bits.
        plain = run(torch.contiguous_format)
        assert result == pytest.approx(plain, abs=1e-5 if device_type() == "cpu" else 2e-3)


@policies
@pytest.mark.parametrize(("dtype", "fused"), [("bfloat16", False), ("float16", False), ("float16", True)])
def test_mixed_precision(world: World, policy: str, dtype: str, fused: bool) -> None:
    """With `autocast`, and with float16 a scaler whose scale is too large at first, and again when it has grown."""

    def run(policy: str) -> list[float]:
        model = make_model()
        scaler = torch.amp.GradScaler(
            device_type(),
            init_scale=2.0**40,
            growth_factor=2.0**20,
            backoff_factor=2.0**-20,
            growth_interval=3,
            enabled=dtype == "float16",
        )
        make = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=fused)
        optimizer = wrap(model, policy, make, grad_scaler=scaler)
        for number in with_a_late_rank(world, policy):
            x, y = batch(world.rank, number)
            optimizer.zero_grad()
            with torch.autocast(device_type(), dtype=getattr(torch, dtype)):
                output = model(x)
            assert output.dtype == getattr(torch, dtype)
            scaler.scale((output.float() - y).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        result = check(world, policy, model, optimizer)
        world.same(scaler.get_scale())
        return result

    result = run(policy)
    if policy == EVERYBODY:
        assert result == pytest.approx(run("full"), abs=5e-3)


@late_or_equal
@pytest.mark.parametrize("way", ["foreach", "fused"])
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_kinds_of_steps(world: World, policy: str, way: str, kind: str) -> None:
    """An optimizer that steps with all parameters at once, in a list of them or in one kernel."""
    settings: dict[str, Any] = {"SGD": {"lr": 0.1, "momentum": 0.9}, "AdamW": {"lr": 0.01}}[kind]

    def run(**ways: bool) -> list[float]:
        make = getattr(torch.optim, kind)
        return train(world, policy, make_model(), lambda parameters: make(parameters, **settings, **ways))

    result = run(**{way: True})
    if policy == EVERYBODY:
        assert result == pytest.approx(run(foreach=False, fused=False), abs=1e-4)


@policies
def test_gradients_that_no_backward_pass_has_put_there(world: World, policy: str) -> None:
    """As with a graph, which replays without hooks: the step finds the gradients."""
    model = make_model()
    parameters = list(model.parameters())

    def backward(x: torch.Tensor, y: torch.Tensor) -> None:
        set_gradients(parameters, torch.autograd.grad(loss_of(model, x, y), parameters))

    result = train(world, policy, model, backward=backward)
    if policy == EVERYBODY:
        assert result == train_plainly(world)


class Rows(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """One rank's data, made in the loader's processes, which must not touch a GPU."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 8 * (STEPS // 2)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.rank + index)
        return torch.randn(4, generator=generator, device="cpu"), torch.randn(2, generator=generator, device="cpu")


@pytest.mark.parametrize("policy", ["full", "solo", "majority"])
@pytest.mark.parametrize("persistent", [False, True])
def test_forked_data_loaders(world: World, policy: str, persistent: bool) -> None:
    """Two epochs from processes that are forked while Horovod's threads run; to a GPU from pinned memory."""
    model, device = make_model(), torch.get_default_device()
    optimizer = wrap(model, policy)
    with torch.device("cpu"):  # as in a loop that moves batches by itself
        loader = torch.utils.data.DataLoader(
            Rows(world.rank),
            batch_size=8,
            num_workers=2,
            multiprocessing_context="fork",
            pin_memory=device.type == "cuda",
            persistent_workers=persistent,
        )
        batches = (batch for _ in range(2) for batch in loader)
        for _ in with_a_late_rank(world, policy):
            x, y = (part.to(device, non_blocking=True) for part in next(batches))
            take_step(optimizer, lambda x=x, y=y: loss_of(model, x, y))
        assert next(batches, None) is None
        check(world, policy, model, optimizer)


# --- On a device, or on the double of one -----------------------------------------------------------------------------


@on_a_device
@policies
def test_several_local_ranks_on_one_device(world: World, policy: str) -> None:
    """As users write it, so that a machine with fewer GPUs than ranks gives one to several of them."""
    if torch.cuda.device_count() > 1:
        pytest.skip("needs a machine with one GPU")
    assert sorted(world.gather(hvd.local_rank())) == list(world.ranks)
    if device_type() == "cuda":
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    model = make_model()
    train(world, policy, model)
    numbers = {devices.device_number(parameter.device) for parameter in model.parameters()}
    assert numbers == {operations.runtime.device_of_buckets()}
    assert world.same(operations.runtime.device_of_buckets()) == 0


# --- CUDA -------------------------------------------------------------------------------------------------------------


@on_cuda
@policies
@pytest.mark.parametrize("number_of_streams", [1, 2])
def test_steps_on_a_side_stream(world: World, policy: str, number_of_streams: int) -> None:
    """Steps are queued there, by a Python that is far ahead of the GPU. The flush, on another stream, waits for them."""
    model, side = make_model(), torch.cuda.Stream()
    first = torch.cuda.Stream() if number_of_streams == 2 else side  # of the first layer
    optimizer = wrap(model, policy)
    side.wait_stream(torch.cuda.current_stream())

    def output(x: torch.Tensor) -> torch.Tensor:
        first.wait_stream(side)
        with torch.cuda.stream(first):
            hidden = model[0](x)
        side.wait_stream(first)
        return cast(torch.Tensor, model[1:](hidden))

    with torch.cuda.stream(side):
        for number in with_a_late_rank(world, policy):
            x, y = batch(world.rank, number)
            torch.cuda._sleep(CYCLES)
            take_step(optimizer, lambda x=x, y=y: loss_of(output, x, y))
    result = check(world, policy, model, optimizer)
    if policy == EVERYBODY:
        assert result == pytest.approx(train_plainly(world), abs=1e-4)


def warm_up(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """What PyTorch asks for before a capture: libraries are loaded, on a stream that is not the default one."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            torch.autograd.grad(loss_of(model, x, y), list(model.parameters()))
    torch.cuda.current_stream().wait_stream(side)


class Graph:
    """Forward and backward passes as a CUDA graph that was captured by hand. Its inputs and gradients stay where they are."""

    def __init__(self, model: torch.nn.Module, during: Callable[[], None] = lambda: None, **options: Any) -> None:
        self.parameters = list(model.parameters())
        self.x, self.y = batch(0, 0)
        self.graph = torch.cuda.CUDAGraph()
        warm_up(model, self.x, self.y)
        capture: AbstractContextManager[None] = torch.cuda.graph(self.graph, **options)
        with capture:
            self.gradients = torch.autograd.grad(loss_of(model, self.x, self.y), self.parameters)
            during()

    def backward(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """As `backward` of a loss, but without autograd and so without hooks: the step finds the gradients."""
        self.x.copy_(x)
        self.y.copy_(y)
        self.graph.replay()
        set_gradients(self.parameters, self.gradients)


@on_cuda
@policies
@pytest.mark.parametrize("way", ["callables", "by hand"])
def test_captured_forward_and_backward_passes(world: World, policy: str, way: str) -> None:
    """CUDA graphs of them, captured before the optimizer is wrapped. The step stays outside."""
    model = make_model()
    world.barrier()  # nobody has a round while another rank captures
    if way == "by hand":
        backward = Graph(model).backward
    else:
        graphed = torch.cuda.make_graphed_callables(model, (batch(0, 0)[0],))

        def backward(x: torch.Tensor, y: torch.Tensor) -> None:
            loss_of(graphed, x, y).backward()

    world.barrier()
    result = train(world, policy, model, backward=backward)
    if policy == EVERYBODY:
        assert result == pytest.approx(train_plainly(world), abs=1e-4)


@on_cuda
def test_rounds_go_on_while_a_rank_captures(world: World) -> None:
    """The late rank captures a graph of its passes, and its Horovod takes part in the others' rounds meanwhile."""
    model, late = make_model(), world.rank == world.size - 1
    optimizer = wrap(model, "solo")
    backward: Callable[..., None] = lambda x, y: loss_of(model, x, y).backward()
    for number in range(STEPS):
        if late and number == 2:
            # Other threads may go on with CUDA in this mode alone.
            during = lambda: world.wait_for("rank 0 is ahead")
            backward = Graph(model, during, capture_error_mode="thread_local").backward
        optimizer.zero_grad()
        backward(*batch(world.rank, number))
        optimizer.step()
        if world.rank == 0 and number == 4:
            world.tell("rank 0 is ahead")
    check(world, "solo", model, optimizer)


@on_cuda
def test_capturing_a_step_is_refused(world: World) -> None:
    model = make_model()
    optimizer = wrap(model, EVERYBODY)
    x, y = batch(world.rank, 0)
    loss_of(model, x, y).backward()
    optimizer.step()
    warm_up(model, x, y)
    refusal = "cannot be captured into a CUDA graph"
    world.barrier()  # nobody has a round while another rank captures
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(RuntimeError, match=refusal):
            hvd.partial_allreduce(x, name=world.name(), sync=EVERYBODY)
        loss = loss_of(model, x, y)
        with pytest.raises(RuntimeError, match=refusal):
            loss.backward()
    world.barrier()
    optimizer.zero_grad()
    loss_of(model, x, y).backward()
    optimizer.step()
    world.same(weights(model))


@on_cuda
@pytest.mark.launch(label="async", environment=STEADY | {"HOROVOD_ENABLE_ASYNC_COMPLETION": "1"})
def test_results_on_the_time_of_the_gpu_are_refused(world: World) -> None:
    refusal = "HOROVOD_ENABLE_ASYNC_COMPLETION=0"
    model = make_model()
    with pytest.raises(ValueError, match=refusal):
        hvd.partial_allreduce(torch.ones(3), name=world.name(), sync="solo")
    for policy in ("solo", "majority", EVERYBODY):
        with pytest.raises(ValueError, match=refusal):
            wrap(model, policy)
    optimizer = wrap(model, "full")  # Horovod's own, which has it
    for number in range(STEPS):
        take_step(optimizer, lambda number=number: loss_of(model, *batch(world.rank, number)))
    world.same(weights(model))


@on_cuda
@pytest.mark.launch(label="job", ranks=(2,), full_ranks=(2, 4))
def test_every_rank_is_told_of_a_gpu_without_memory(job: Job) -> None:
    """The last rank has taken nearly all memory for itself when it is late, and needs some for zeros."""
    late = job.setup.ranks - 1
    assert job.run("full_gpu", str(late), str(BYTES)) != 0
    errors = job.notes("error")
    assert len(errors) == job.setup.ranks, job.output()
    cause = rf"rank {late} could not keep what belongs to bucket: GPU \d+ has no {BYTES} bytes left"
    for error in errors.values():
        assert re.search(f"rank {late} has failed: {cause}", error)


# --- Work sharing


def compute(seconds: float) -> None:
    """Let the device compute for about so long, behind the host's back."""
    if device_type() == "cuda":
        torch.cuda._sleep(int(CYCLES_A_SECOND * seconds))
    else:
        library = f"{horovod_partial.__path__[0]}/libhorovod_partial_attach.so"
        ctypes.CDLL(library).double_computes(ctypes.c_double(seconds))


@on_a_device
def test_micro_batches_end_on_the_device(world: World) -> None:
    """Rank 0 has a slow device and a fast host. It makes few micro-batches, and each one is in one update."""
    passes, updates, seconds = 4, 4, 0.02
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), op=hvd.Sum, backward_passes_per_step=passes, sync=hvd.WorkSharing()
    )
    made = 0
    while optimizer.rounds < updates:
        compute(seconds * (10 if world.rank == 0 else 1))
        take_step(optimizer, weight.sum)
        made += 1
    optimizer.flush()
    assert weight.tolist() == [-passes * world.size * updates] * 3
    numbers = world.gather(made)
    assert sum(numbers) == passes * world.size * updates
    assert numbers[0] <= passes + 2 * (updates - 1)  # its own share of the first update, then one or two of each
