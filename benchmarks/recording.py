"""What a recording or a watch costs: steps with one against steps without, by the same optimizer.

    .venv/bin/python benchmarks/recording.py [--what watch] [--framework tensorflow] [--json FILE] [--transport gloo]

There is no compute, as in overhead.py. Blocks of steps with and without it take turns in one job, in one order and then
in the other, behind a barrier; two blocks that follow each other are a pair. The figure is the geometric mean of the
pairs' ratios, with its 95 % interval (Student's t). What a recording takes on the disk stands beside it.
"""

from __future__ import annotations

import importlib
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
from harness import ratios, shapes

POLICIES = ("full", "majority")


def measure(what: str, module: str, front_end: str, pairs: int, steps: dict[str, int]) -> dict[str, dict[str, Any]]:
    """On every rank: for each set of shapes and policy the seconds of a step, without and with a recording or a watch."""
    own = importlib.import_module(module)
    hvd = importlib.import_module(front_end)
    core = importlib.import_module(f"{front_end}.operations").runtime.core
    found = {}
    for shape_set, make_shapes in shapes.SETS.items():
        arms = own.make_steps(shape_set, make_shapes())
        for policy in POLICIES:
            folder = Path(tempfile.mkdtemp(prefix="recording-"))
            seconds: dict[bool, list[float]] = {False: [], True: []}

            def begin(name: str, folder: Path = folder) -> None:
                if what == "watch":
                    hvd.watch()
                else:
                    hvd.record(folder / name)

            def end() -> None:
                if what == "watch":
                    core.watch(False)
                else:
                    core.end_recording()

            for pair in range(-1, pairs):  # the first one warms up
                harness.progress(f"{what}, {shape_set}, {policy}", pair + 1, pairs + 1)
                for is_on in (False, True) if pair % 2 == 0 else (True, False):
                    if is_on:
                        begin(str(pair))
                    own.barrier()
                    start = time.perf_counter()
                    for _ in range(steps[shape_set]):
                        arms[policy]()
                    took = (time.perf_counter() - start) / steps[shape_set]
                    if is_on:
                        end()
                    if pair >= 0:
                        seconds[is_on].append(took)
            nbytes = sum(file.stat().st_size for file in folder.rglob("*.jsonl"))
            shutil.rmtree(folder)
            off, on = own.mean_over_ranks([seconds[False], seconds[True]], f"{shape_set}.{policy}.seconds")
            found[f"{shape_set}, {policy}"] = {
                "off": off,
                "on": on,
                "bytes_per_step": nbytes / (pairs + 1) / steps[shape_set],
            }
    return found


def main() -> None:
    parser = harness.arguments(__doc__, ranks=4)
    parser.add_argument("--what", choices=("recording", "watch"), default="recording", help="what is measured")
    parser.add_argument("--framework", choices=("torch", "tensorflow"), default="torch", help="whose optimizers")
    parser.add_argument("--pairs", type=int, default=20, help="of blocks")
    parser.add_argument("--steps", type=int, nargs=2, default=(6, 40), help="of a block, for each set of shapes")
    options = parser.parse_args()
    if options.pairs < 2:
        parser.error("an interval takes 2 pairs or more")
    framework = options.framework
    measured = harness.launch(
        measure,
        ranks=options.ranks,
        transport=options.transport,
        framework=framework,
        what=options.what,
        module=f"harness.steps_{framework}",
        front_end=f"horovod_partial.{framework}",
        pairs=options.pairs,
        steps=dict(zip(shapes.SETS, options.steps, strict=True)),
    )
    figures: dict[str, Any] = {
        "what": options.what,
        "framework": framework,
        "ranks": options.ranks,
        "transport": options.transport,
    }
    rows = []
    for name, found in measured.items():
        ratio = ratios.with_interval(found["on"], found["off"])
        figures[name] = {**ratio, **found}
        milliseconds = f"{1e3 * statistics.median(found['off']):.2f}"
        rows.append([name, milliseconds, *ratios.shown(ratio), f"{found['bytes_per_step'] / 1e3:.2f}"])
    title = f"Step time with a {options.what} over that without, {framework}, {options.ranks} ranks over "
    columns = ["shapes, policy", "ms without", "ratio", "95 % interval", "kB a step of rank 0"]
    harness.print_table(f"{title}{options.transport}, {options.pairs} pairs", columns, rows)
    harness.write_json(options.json, figures)


if __name__ == "__main__":
    main()
