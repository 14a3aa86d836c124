"""Work sharing beside `Full` with the same accumulation: the time of an update with delays of several kinds.

    .venv/bin/python benchmarks/work_sharing.py [--passes 4 8] [--json FILE] [--transport gloo] [--fit tensorflow]

A micro-batch takes 10 ms (a sleep; `--micro-ms`), and an update has so many of them for each rank. Both policies take
turns in one job, in one order and then in the other. A figure is the median of the ratios of pairs, with the least and the largest. Kinds
of delays: none; in each update one random rank is late by as long as its part takes (`random`); one rank takes 3 times as
long (`steady`); a rank's part of an update takes a factor that is drawn from a log-normal distribution of sigma 0.5
(`log-normal`); and the demo's factors of 0.25, 0.5, 1 and 2.25 in turn (`rotating`). `--fit` measures `model.fit` of Keras on a backend,
instead of a loop in PyTorch. `--busy 2` runs two other processes beside the job, which compute all the time. With
`--computing` a micro-batch computes until its thread has used so much of a processor, and sleeps for its delay only.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from typing import Any

import harness
import numpy as np

WEIGHTS = 10_000
KINDS = ("none", "random", "steady", "log-normal", "rotating")
FACTORS = (0.25, 0.5, 1.0, 2.25)


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


def update_seconds(kind: str, sync: str, passes: int, updates: int, micro_seconds: float, computing: bool) -> float:
    """On every rank: the mean time of an update in a loop of PyTorch."""
    import torch
    from harness import steps_torch

    import horovod_partial.torch as hvd

    weight = torch.nn.Parameter(torch.zeros(WEIGHTS))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.01), backward_passes_per_step=passes, sync=sync)
    start, made, update = 0.0, 0, -1  # the first update is not measured
    steps_torch.barrier()
    while update < updates:
        if update >= 0 and start == 0.0:
            start = time.perf_counter()
        factor = delay_factor(kind, update + 1, hvd.rank(), hvd.size(), passes, made)
        work(micro_seconds, factor, computing)
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
) -> Iterator[dict[str, Any]]:
    """On every rank: by kind of delay, number of passes and policy the times of an update so far, in seconds."""
    hvd = importlib.import_module("horovod_partial.torch" if fit is None else "horovod_partial.keras")
    seconds = update_seconds if fit is None else update_seconds_of_fit
    empty = lambda: {"full": [], "work_sharing": []}
    times: dict[str, Any] = {kind: {str(each): empty() for each in passes} for kind in kinds}
    for pair in range(pairs):
        for kind in kinds:
            for each in passes:
                harness.progress(f"pair {pair}, {kind}, {each} passes", pair, pairs)
                for sync in harness.in_turn(("full", "work_sharing"), pair):
                    own = seconds(kind, sync, each, updates, micro_seconds, computing)
                    times[kind][str(each)][sync].append(float(np.mean(hvd.allgather_object(own))))
        yield times


def main() -> None:
    parser = harness.arguments(__doc__, ranks=8)
    parser.add_argument("--passes", type=int, nargs="+", default=[4, 8], help="micro-batches of a rank in an update")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of delays")
    parser.add_argument("--updates", type=int, default=25, help="of a run")
    parser.add_argument("--pairs", type=int, default=20, help="runs of each policy")
    parser.add_argument("--micro-ms", type=float, default=10.0, help="milliseconds of a micro-batch")
    parser.add_argument("--computing", action="store_true", help="in place of sleeping")
    parser.add_argument("--busy", type=int, default=0, help="processes that compute beside the job")
    parser.add_argument("--fit", choices=("tensorflow", "torch"), help="Keras's backend, to measure its `fit`")
    options = parser.parse_args()
    job = {"ranks": options.ranks, "transport": options.transport}
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
        options.json, {**job, **beside, **load, "seconds": times, "figures": figures_of(times)}
    )
    with harness.busy_processes(options.busy):
        times = harness.launch(measure, **job, **load, **of_keras, on_result=write)
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
