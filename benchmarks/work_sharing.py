"""Work sharing beside `Full` with the same accumulation: the time of an update with delays of several kinds.

    .venv/bin/python benchmarks/work_sharing.py [--passes 4 8] [--json FILE] [--transport gloo] [--fit tensorflow]
    .venv/bin/python benchmarks/work_sharing.py --device cuda --quick --micro-ms 20

A micro-batch takes 10 ms (a sleep; `--micro-ms`), and an update has so many of them for each rank. Both policies take
turns in one job, in one order and then in the other. A figure is the median of the ratios of pairs, with the least and the largest. Kinds
of delays: none; in each update one random rank is late by as long as its part takes (`random`); one rank takes 3 times as
long (`steady`); a rank's part of an update takes a factor that is drawn from a log-normal distribution of sigma 0.5
(`log-normal`); and the demo's factors of 0.25, 0.5, 1 and 2.25 in turn (`rotating`). `--fit` measures `model.fit` of Keras on a backend,
instead of a loop in PyTorch. `--busy 2` runs two other processes beside the job, which compute all the time. With
`--computing` a micro-batch computes until its thread has used so much of a processor, and sleeps for its delay only.

On a GPU a micro-batch is multiplications of matrices, and one that is late multiplies more often. How many take the time of
a micro-batch is measured before, while all ranks multiply. They share the GPU; the matrices are so small that the ranks can
run side by side, if NVIDIA's Multi-Process Service runs.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import harness
import numpy as np

WEIGHTS = 10_000
KINDS = ("none", "random", "steady", "log-normal", "rotating")
FACTORS = (0.25, 0.5, 1.0, 2.25)
QUICK = {"kinds": ["none", "steady"], "passes": [4], "updates": 10}
QUICK_SECONDS = 25.0  # behind the first pair
SIDE, DEPTH = 512, 4096  # of the matrices on a GPU: a product has few numbers, each the sum of many
CALIBRATION = 100  # multiplications


def delay_factor(kind: str, update: int, rank: int, size: int, passes: int, made: int) -> float:
    """How many times as long as usual a rank's next micro-batch takes, in an update of which it has made so many."""
    drawn = np.random.default_rng((1, update))
    if kind == "random":
        late = rank == drawn.integers(size) and made == 0
        return 1 + passes * late
    if kind == "steady":
        return 3 if rank == 1 else 1
    if kind == "log-normal":
        return float(drawn.lognormal(0.0, 0.5, size)[rank])
    if kind == "rotating":
        return FACTORS[(rank + update) % len(FACTORS)]
    return 1


def work(seconds: float, factor: float, computing: bool) -> None:
    """Be a micro-batch, `factor` times as long as usual: sleep, or compute for the usual time at most, and sleep for the rest."""
    computed = seconds * min(factor, 1.0) if computing else 0.0  # by this thread, of a processor's time
    end = time.thread_time() + computed
    while time.thread_time() < end:
        sum(range(2000))
    time.sleep(seconds * factor - computed)


@functools.cache
def kernels(seconds: float) -> Callable[[float], None]:
    """Measure how many multiplications take so long while all ranks multiply. Returns what queues `factor` times as many."""
    import torch
    from harness import steps_torch

    import horovod_partial.torch as hvd

    left, right, product = torch.rand(SIDE, DEPTH), torch.rand(DEPTH, SIDE), torch.empty(SIDE, SIDE)

    def queue(number: int) -> None:
        for _ in range(number):
            torch.mm(left, right, out=product)

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    queue(CALIBRATION)
    steps_torch.barrier()
    begin.record()
    queue(CALIBRATION)
    end.record()
    end.synchronize()
    each = max(hvd.allgather_object(begin.elapsed_time(end))) / 1e3 / CALIBRATION
    return lambda factor: queue(max(1, round(factor * seconds / each)))


def update_seconds(kind: str, sync: str, passes: int, updates: int, micro_seconds: float, computing: bool) -> float:
    """On every rank: the mean time of an update in a loop of PyTorch."""
    import torch
    from harness import steps_torch

    import horovod_partial.torch as hvd

    on_gpu = torch.get_default_device().type == "cuda"
    make = kernels(micro_seconds) if on_gpu else lambda factor: work(micro_seconds, factor, computing)
    weight = torch.nn.Parameter(torch.zeros(WEIGHTS))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.01), backward_passes_per_step=passes, sync=sync)
    start, made, update = 0.0, 0, -1  # the first update is not measured
    steps_torch.barrier()
    while update < updates:
        if update >= 0 and start == 0.0:
            start = time.perf_counter()
        factor = delay_factor(kind, update + 1, hvd.rank(), hvd.size(), passes, made)
        make(factor)
        weight.sum().backward()
        made += 1
        if sync != "full":
            optimizer.step()
            updated = optimizer.updated
        elif made == passes:
            optimizer.step()
            optimizer.zero_grad()
            updated = 1
        else:
            updated = 0
        if updated:
            update, made = update + updated, 0
    seconds = (time.perf_counter() - start) / updates
    optimizer.flush()
    return seconds


def update_seconds_of_fit(
    kind: str, sync: str, passes: int, updates: int, micro_seconds: float, computing: bool
) -> float:
    """On every rank: the mean time of an update in an epoch of `model.fit`, after an epoch of two updates."""
    import keras

    import horovod_partial.keras as hvd
    from horovod_partial.keras.dynamic_sharding import DynamicShardingDataset

    side = int(WEIGHTS**0.5)
    model = keras.Sequential([keras.Input((side,)), keras.layers.Dense(side, use_bias=False)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), backward_passes_per_step=passes, sync=sync)
    model.compile(optimizer, "mse")

    class Delays(keras.callbacks.Callback):  # type: ignore[misc]
        update, made = 0, 0

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            update = optimizer.rounds
            self.made = self.made + 1 if update == self.update else 0
            self.update = update
            factor = delay_factor(kind, update, hvd.rank(), hvd.size(), passes, self.made)
            work(micro_seconds, factor, computing)

    def fit(updates: int) -> float:
        samples = np.zeros((updates * passes * (1 if sync == "full" else hvd.size()), side), "float32")
        data = {"x": samples, "y": samples, "batch_size": 1}
        if sync != "full":
            data = {"x": DynamicShardingDataset(samples, samples, optimizer=optimizer, batch_size=1)}
        hvd.allreduce(0.0, name="barrier")
        start = time.perf_counter()
        model.fit(**data, callbacks=[Delays()], verbose=0)
        return (time.perf_counter() - start) / updates

    fit(2)
    return fit(updates)


def measure(
    kinds: list[str],
    passes: list[int],
    updates: int,
    pairs: int,
    micro_seconds: float,
    computing: bool,
    fit: str | None,
    limit: float | None,
) -> Iterator[dict[str, Any]]:
    """On every rank: by kind of delay, number of passes and policy the times of an update so far, in seconds."""
    hvd = importlib.import_module("horovod_partial.torch" if fit is None else "horovod_partial.keras")
    seconds = update_seconds if fit is None else update_seconds_of_fit
    empty = lambda: {"full": [], "work_sharing": []}
    times: dict[str, Any] = {kind: {str(each): empty() for each in passes} for kind in kinds}
    end = None
    for pair in range(pairs):
        if end is not None and any(hvd.allgather_object(time.monotonic() > end)):
            break
        for kind in kinds:
            for each in passes:
                harness.progress(f"pair {pair}, {kind}, {each} passes", pair, pairs)
                for sync in harness.in_turn(("full", "work_sharing"), pair):
                    own = seconds(kind, sync, each, updates, micro_seconds, computing)
                    times[kind][str(each)][sync].append(float(np.mean(hvd.allgather_object(own))))
        yield times
        if end is None and limit is not None:
            end = time.monotonic() + limit


def main() -> None:
    parser = harness.arguments(__doc__, ranks=8, device=True)
    parser.add_argument("--passes", type=int, nargs="+", default=[4, 8], help="micro-batches of a rank in an update")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of delays")
    parser.add_argument("--updates", type=int, default=25, help="of a run")
    parser.add_argument("--pairs", type=int, default=20, help="runs of each policy")
    parser.add_argument("--micro-ms", type=float, default=10.0, help="milliseconds of a micro-batch")
    parser.add_argument("--computing", action="store_true", help="in place of sleeping")
    parser.add_argument("--busy", type=int, default=0, help="processes that compute beside the job")
    parser.add_argument("--fit", choices=("tensorflow", "torch"), help="Keras's backend, to measure its `fit`")
    options = parser.parse_args()
    if options.fit and options.device != "cpu":
        parser.error("--fit sleeps: it needs --device cpu")
    if options.quick:
        vars(options).update(QUICK)
    job = {"ranks": options.ranks, "transport": options.transport, "device": options.device}
    beside = {"busy_processes": options.busy}
    load = {
        "kinds": options.kinds,
        "passes": options.passes,
        "updates": options.updates,
        "pairs": options.pairs,
        "micro_seconds": options.micro_ms / 1e3,
        "computing": options.computing,
        "fit": options.fit,
    }
    of_keras = {"framework": options.fit, "environment": {"KERAS_BACKEND": options.fit}} if options.fit else {}
    write = lambda times: harness.write_json(
        options.json, {**job, **beside, **load, "quick": options.quick, "seconds": times, "figures": figures_of(times)}
    )
    with harness.busy_processes(options.busy):
        limit = QUICK_SECONDS if options.quick else None
        times = harness.launch(measure, **job, **load, **of_keras, limit=limit, on_result=write)
    shown = lambda of: f"{of['ratio']:.2f} ({of['least']:.2f} to {of['largest']:.2f})"
    harness.print_table(
        f"Time of an update under Full over that under WorkSharing, {options.ranks} ranks over {options.transport}",
        ["delays", *(f"K = {each}" for each in options.passes)],
        [[kind, *map(shown, by.values())] for kind, by in figures_of(times).items()],
    )


def figures_of(times: dict[str, Any]) -> dict[str, Any]:
    """By kind of delay and number of passes: the ratio of pairs, its range, and the median times of an update."""
    return {kind: {each: compared(**of) for each, of in by.items()} for kind, by in times.items()}


def compared(full: list[float], work_sharing: list[float]) -> dict[str, float]:
    ratios = np.divide(full, work_sharing)
    return {
        "ratio": float(np.median(ratios)),
        "least": float(ratios.min()),
        "largest": float(ratios.max()),
        "full_ms": 1e3 * float(np.median(full)),
        "work_sharing_ms": 1e3 * float(np.median(work_sharing)),
    }


if __name__ == "__main__":
    main()
