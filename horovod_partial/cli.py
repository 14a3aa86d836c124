"""The command `horovod-partial`."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import typer
from rich.console import Console
from rich.table import Table

from horovod_partial import __version__

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Partial collectives for a stock Horovod.")

FRAMEWORKS = ("torch", "tensorflow")

# The self-test of `horovod-partial check`. It runs in a process of its own for each framework.
# A process cannot undo the attachment of this package to Horovod, and Horovod may abort the process if MPI is broken.
SELF_TEST = """
import {framework}
import horovod_partial.{framework} as hvd
hvd.init()
x = hvd.partial_allreduce({framework}.ones(3), name="check", op=hvd.Sum, sync=hvd.Solo())
assert x.numpy().tolist() == [hvd.size()] * 3, x
hvd.shutdown()
"""

# Code that is added to a self-test if Horovod has NCCL. The code prints which NCCL is in use, as one line of JSON.
NCCL_QUESTION = """
import json
from horovod.{framework} import mpi_ops
from horovod_partial.runtime import nccl
own = nccl.of_horovod(mpi_ops._basics.MPI_LIB_CTYPES._name, mpi_ops.nccl_built())
print(json.dumps(nccl.describe("{framework}", own, nccl.loaded())))
"""

# The user's program, which `horovod-partial run` starts. The program starts only after typer has returned, because
# typer would catch some of the program's exceptions.
_programs: list[Callable[[], None]] = []


@app.callback(invoke_without_command=True)
def version_option(
    version: bool = typer.Option(False, "--version", help="Show the version and exit.", is_eager=True),
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
def check() -> None:
    """Show what this installation can do. Try each framework on one rank: attach, initialise, reduce a tensor."""
    try:
        from horovod_partial import _build_info as built
    except ImportError:
        typer.echo("horovod_partial has not been built: run `pip install .`", err=True)
        raise typer.Exit(1) from None
    from horovod_partial.policies import Policy

    table = Table(title=f"horovod_partial {__version__} for Horovod {built.HOROVOD_VERSION}")
    table.add_column("")
    table.add_column("available")
    for framework in FRAMEWORKS:
        table.add_row(framework, built.FRAMEWORKS.get(framework, "no"))
    for transport, feature in (("MPI", "mpi"), ("Gloo", "gloo")):
        table.add_row(f"rounds over {transport}", "yes" if feature in built.FEATURES else "no")
    has_nccl = "nccl" in built.FEATURES
    for framework in built.FRAMEWORKS:
        on_gpus = "yes" if framework == "torch" else "experimental"
        table.add_row(f"rounds of GPU tensors, {framework}", on_gpus if has_nccl and "cuda" in built.FEATURES else "no")
    for policy in get_args(Policy):
        table.add_row(f"policy {policy.__name__}", "yes")
    tests = {framework: _self_test(framework, has_nccl) for framework in FRAMEWORKS if framework in built.FRAMEWORKS}
    for framework, (failure, _) in tests.items():
        table.add_row(f"attach self-test, {framework}", "FAILED" if failure else "passed")
    Console().print(table)
    for _, text in tests.values():
        if text:
            typer.echo(text)
    failures = [failure for failure, _ in tests.values() if failure]
    if failures:
        typer.echo("\n".join(failures), err=True)
        raise typer.Exit(1)


def _self_test(framework: str, has_nccl: bool) -> tuple[str, str]:
    """Return two texts: why the self-test failed (or ""), and which NCCL is in use (or "" if none or not known)."""
    program = SELF_TEST + (NCCL_QUESTION if has_nccl else "")
    command = [sys.executable, "-c", program.format(framework=framework)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return "the self-test did not end within a minute", ""
    if result.returncode != 0:
        last = result.stderr.strip().rpartition("\n")[2]
        return (last if last.startswith("ImportError: horovod_partial was built ") else result.stderr), ""
    return "", json.loads(result.stdout.splitlines()[-1]) if has_nccl else ""


@app.command()
def plan(
    path: str = typer.Argument(help="A file that `optimizer.merging_plan.save` made."),
    latency_ms: float | None = typer.Option(None, min=0.0, help="Start-up of a message; replaces the measured one."),
    ns_per_byte: float | None = typer.Option(None, min=0.0, help="Time of a byte; replaces the measured one."),
    output: str | None = typer.Option(None, help="File for a picture of backward and messages under each rule."),
) -> None:
    """Compare the rules that plan which gradients travel in one message, by the measured times in a saved plan."""
    from horovod_partial import merging

    with _refusing():
        saved = merging.MergingPlan.load(path)
    if saved.cost is None and (latency_ms is None or ns_per_byte is None):
        raise _refused(f"{path} has no cost of messages ({saved.reason}); give --latency-ms and --ns-per-byte")
    measured = saved.cost or merging.MessageCost(0.0, 0.0)
    cost = merging.MessageCost(
        measured.latency if latency_ms is None else latency_ms / 1e3,
        measured.seconds_per_byte if ns_per_byte is None else ns_per_byte / 1e9,
    )
    plans = {rule: saved.by_rule(rule, cost) for rule in merging.RULES}
    table = Table(title=f"{len(saved.gradients)} gradients, {sum(saved.nbytes) / 1e6:.1f} MB", title_justify="left")
    for column in ("rule", "messages", "ms", "over exact"):
        table.add_column(column, justify="left" if column == "rule" else "right")
    best = plans["exact"].duration(cost)
    for rule, made in plans.items():
        duration = made.duration(cost)
        table.add_row(rule, str(len(made.messages)), f"{1e3 * duration:.2f}", f"{duration / best:.3f}")
    Console().print(table)
    typer.echo("Times are from the first gradient to the last result.")
    if output is not None:
        from horovod_partial.insight.simulate import Trace

        plots = _for_output("insight.plots", "matplotlib", "matplotlib")
        with _refusing():
            plots.gantt(Trace.recorded(saved), merging.RULES, cost, f"{path}: backward and messages", Path(output))


@app.command()
def simulate(
    trace: str = typer.Argument(help="A file that tools/make_traces.py or `optimizer.merging_plan.save` made."),
    policies: list[str] = typer.Option(["full"], "--sync", help="A sync policy; may be given several times."),  # noqa: B008 (typer's way)
    rules: str = typer.Option("exact,wait_free,single", help="Rules of merged gradients, with commas between them."),
    ranks: str = typer.Option("4,8,16,32,64", help="Numbers of ranks, with commas between them."),
    delay: str = typer.Option(
        "none",
        help="none, random:RANKS:S, rotating:S:S..., slow:FACTOR, log-normal:S:SIGMA, steps:CSV or resampled:CSV.",
    ),
    delay_in: str = typer.Option(
        "each", help="Under work sharing, what a rank's delay lengthens: each of its micro-batches, or the first one."
    ),
    passes: int = typer.Option(1, min=1, help="Micro-batches in a step: backward_passes_per_step."),
    split_ms: float = typer.Option(0.0, min=0.0, help="How much longer a micro-batch takes than its part of the step."),
    backward: float | None = typer.Option(None, min=1e-9, help="Scale the trace so that backward takes these seconds."),
    latency_ms: float = typer.Option(0.972, min=0.0, help="Measured start-up of an allreduce over a ring."),
    ns_per_byte: float = typer.Option(1.97, min=0.0, help="Measured time of a byte in this allreduce."),
    measured_ranks: int = typer.Option(16, min=2, help="Number of ranks in the ring of these two measurements."),
    algorithm: str = typer.Option(
        "ring",
        help="Algorithm of allreduces: ring, recursive_doubling, recursive_halving_doubling, binary_tree or "
        "double_binary_trees.",
    ),
    cycle_ms: float = typer.Option(1.0, min=0.0, help="HOROVOD_CYCLE_TIME."),
    iterations: int = typer.Option(100, min=1, help="Steps of each rank. Without delays three are enough."),
    seed: int = typer.Option(0, min=0, help="Seed of the delays."),
    output: str | None = typer.Option(None, help="Folder for scaling.png, and gantt.png for the largest job."),
) -> None:
    """Simulate a job: iteration time, efficiency, contributors and staleness, by policy, rule and number of ranks.

    Column bound: the best possible schedule of whole micro-batches. Default cluster: the first of the MG-WFBP paper.
    """
    from horovod_partial.insight.simulate import Cluster, Result, Trace, parse_delays
    from horovod_partial.insight.simulate import simulate as run
    from horovod_partial.merging import MessageCost
    from horovod_partial.policies import ModelPolicy, parse

    plots = _for_output("insight.plots", "matplotlib", "matplotlib") if output is not None else None
    table = Table(title_justify="left")
    shown = ("ranks", "policy", "rule", "messages", "ms", "bound", "efficiency", "late", "contributors", "staleness")
    for column in shown:
        table.add_column(column, justify="left" if column in ("policy", "rule") else "right")
    curves: dict[str, dict[int, Result]] = {}
    with _refusing():
        model = Trace.load(trace)
        model = model if backward is None else model.scaled(backward)
        cluster = Cluster.fit_ring(MessageCost(latency_ms / 1e3, ns_per_byte / 1e9), measured_ranks)
        delays = parse_delays(delay)
        sizes = sorted({int(size) for size in ranks.split(",")})
        for size, name in itertools.product(sizes, policies):
            policy = parse(name)
            for rule in ["-"] if isinstance(policy, ModelPolicy) else rules.split(","):
                result = run(
                    model,
                    policy,
                    size,
                    cluster=cluster,
                    algorithm=algorithm,
                    rule="single" if rule == "-" else rule,
                    iterations=min(3, iterations) if delays is None else iterations,
                    delays=delays,
                    seed=seed,
                    cycle=cycle_ms / 1e3,
                    passes=passes,
                    split=split_ms / 1e3,
                    delays_in=delay_in,
                )
                curves.setdefault(f"{name}, {rule}".removesuffix(", -"), {})[size] = result
                table.add_row(
                    *(str(size), name, rule, str(result.messages), f"{1e3 * result.iteration_time:.1f}"),
                    "-" if result.bound is None else f"{1e3 * result.bound:.1f}",
                    *(f"{result.efficiency:.3f}", f"{result.late:.1%}"),
                    *(f"{result.contributors:.1f}", f"{result.staleness:.2f}"),
                )
    title = f"{model.name}, backward {1e3 * model.backward:.0f} ms, {algorithm}"
    title += f", {passes} micro-batches" if passes > 1 else ""
    table.title = f"{title}, delays: {delay}"
    console = Console()
    console.width = max(console.width, 110)  # in a narrower console the table would cut names off
    console.print(table)
    if output is not None and plots is not None:
        folder = Path(output)
        folder.mkdir(parents=True, exist_ok=True)
        plots.scaling(curves, table.title, folder / "scaling.png")
        step, cost = model.split(passes, split_ms / 1e3), cluster.cost(algorithm, sizes[-1])
        plots.gantt(step, rules.split(","), cost, f"{title}, {sizes[-1]} ranks", folder / "gantt.png")
        typer.echo(f"plots: {folder / 'scaling.png'}, {folder / 'gantt.png'}")


@app.command()
def report(
    folders: list[str] = typer.Argument(  # noqa: B008 (typer's way)
        metavar="DIR [AFTER]", help="Folder that HOROVOD_PARTIAL_RECORD named, or one run in it. Two are compared."
    ),
    runs: list[str] | None = typer.Option(  # noqa: B008 (typer's way)
        None,
        "--run",
        help="Name of a run; without it the newest one is read. Give it twice to compare two runs of DIR.",
    ),
    output: str | None = typer.Option(None, help="File for a page with plots, FILE.html; it needs no network."),
) -> None:
    """Show from a recording which rank is slow, where the time went, and how much time ranks have waited.

    With two recordings, BEFORE and AFTER, show what changed.
    """
    from horovod_partial.insight import recording
    from horovod_partial.insight.report import Summary, comparison, text

    page = _for_output("insight.report.page", "plotly", "horovod-partial[report]") if output is not None else None
    names: Sequence[str | None] = runs if runs else [None] * len(folders)
    folders = folders * len(names) if len(folders) == 1 else folders
    if len(folders) != len(names) or len(folders) > 2:
        raise _refused("a report shows one run or two: give --run once for each of them, or name their folders")
    with _refusing():
        shown = comparison.labelled([Summary.of(recording.load(*of)) for of in zip(folders, names, strict=True)])
        text.show(shown)
        if page is not None:
            page.write(shown, output)


@app.command()
def advise(
    folder: str = typer.Argument(metavar="DIR", help="Folder that HOROVOD_PARTIAL_RECORD named, or one run in it."),
    run: str | None = typer.Option(None, help="Name of a run; without it the newest one is read."),
    optimizer: str | None = typer.Option(None, help="The job's optimizer: sgd, adam, adamw or muon."),
    split_ms: float = typer.Option(0.0, min=0.0, help="How much longer a micro-batch takes than its part of a step."),
    anyway: bool = typer.Option(False, "--anyway", help="Advise even if every rank lacked processors in its steps."),
) -> None:
    """Predict from a recording how long the program would take under each policy, and recommend one."""
    from horovod_partial.insight import advice, recording

    if optimizer is not None and (optimizer := optimizer.lower()) not in advice.LEAST_QUORUM:
        raise _refused(f"--optimizer must be one of {', '.join(advice.LEAST_QUORUM)}, not {optimizer!r}")
    with _refusing():
        found = advice.advise(recording.load(folder, run), optimizer, split_ms / 1e3, anyway=anyway)
    table = Table(title=found.title, title_justify="left")
    names = "ms/step", "95 % of resamples", "speed-up", "by rounds"
    for column in ("policy", *names, "late", "staleness", "95 % of those"):
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    full = found.predictions[0]
    for one in found.predictions:
        low, high = (1e3 * bound for bound in one.interval)
        interval = "-" if math.isnan(low) else f"{low:.1f} to {high:.1f}"
        times = f"{1e3 * one.seconds:.1f}", interval, f"{full.seconds / one.seconds:.2f}", f"{one.rate / full.rate:.2f}"
        table.add_row(str(one), *times, f"{one.late:.1%}", f"{one.staleness:.2f}", f"{one.staleness_95:.0f}")
    console = Console()
    console.width = max(console.width, 120)
    console.print(table)
    typer.echo("\n".join([found.text, *found.remarks]))


@app.command()
def top(
    address: str = typer.Argument(metavar="HOST:PORT", help="Where rank 0 serves metrics."),
    interval: float = typer.Option(2.0, min=0.1, help="Seconds between two looks."),
    once: bool = typer.Option(False, "--once", help="Look once, then end. Without a job this is an error."),
) -> None:
    """Show a running job, rank by rank. HOROVOD_PARTIAL_METRICS_PORT must be set in the job.

    Without --once this command waits until the job begins.
    """
    from rich.live import Live

    from horovod_partial.metrics import top as tops

    read = partial(tops.read, address)
    shown = tops.frames(read, interval)
    hint = (
        "Rank 0 listens there if HOROVOD_PARTIAL_METRICS_PORT is set in the job, and HOROVOD_PARTIAL_METRICS_HOST if it is "
        "on another host."
    )
    gone = f"nothing answers at {address} any more"
    with contextlib.suppress(KeyboardInterrupt):
        try:
            if not once:
                tops.wait(
                    read,
                    lambda: typer.echo(f"Nothing listens at {address} yet. {hint} Waiting; Ctrl+C ends.", err=True),
                )
            first = next(shown)
            if once:
                Console().print(first)
                return
            with Live(first, auto_refresh=False) as live:
                for frame in shown:
                    live.update(frame, refresh=True)
        except StopIteration:
            raise _refused(gone) from None
        except OSError as error:
            raise _refused(f"nothing answers at {address}: {error}. {hint}") from None
        except ValueError as error:
            raise _refused(f"{address}: {error}") from None
        typer.echo(gone)


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    program: str = typer.Argument(help="A script that imports Horovod; with -m, a module."),
    arguments: list[str] | None = typer.Argument(None, help="Arguments of the program."),  # noqa: B008 (typer's way)
    is_module: bool = typer.Option(False, "-m", help="The program is the name of a module."),
    sync: str | None = typer.Option(
        None, help="Policy to use if the program names none: majority, solo, quorum:0.75 …"
    ),
    record: str | None = typer.Option(None, metavar="DIR", help="Record in this folder which rank is slow, and why."),
    watch: bool = typer.Option(False, "--watch", help="Log which rank is slow while the program runs."),
    metrics_port: int | None = typer.Option(
        None, min=0, max=65535, help="Port at which rank 0 serves metrics; 0 for none."
    ),
) -> None:
    """Run an unedited program that was written for Horovod, with this package in Horovod's place.

    On every rank: horovodrun -np 4 horovod-partial run --sync majority train.py --lr 0.1
    """
    from horovod_partial import policies
    from horovod_partial.names import program as programs

    if sync is not None:
        with _refusing("--sync: "):
            policies.parse(sync)
    if not is_module and not Path(program).is_file():
        raise _refused(f"there is no file {program}")
    given = {"SYNC": sync, "RECORD": record, "WATCH": "1" if watch else None, "METRICS_PORT": metrics_port}
    settings = {name: str(value) for name, value in given.items() if value is not None}
    _programs.append(partial(programs.run, program, arguments or [], is_module=is_module, settings=settings))


@app.command(context_settings={"allow_interspersed_args": False})
def srun(command: list[str] = typer.Argument(help="A program and its arguments.")) -> None:  # noqa: B008 (typer's way)
    """Turn the tasks of a Slurm step into ranks of Horovod over Gloo, and run a program on each.

    Start it with srun: srun -n 4 horovod-partial srun python train.py --lr 0.1
    """
    from horovod_partial.launch import slurm

    with _refusing("horovod-partial srun: "):
        slurm.run(command)


def _for_output(module: str, needs: str, install: str) -> Any:
    """Import a module that only `--output` uses. Ends the command with an error if a needed package is missing."""
    try:
        return importlib.import_module(f"horovod_partial.{module}")
    except ImportError:
        raise _refused(f"--output needs {needs}: run `pip install {install}`") from None


@contextlib.contextmanager
def _refusing(begin: str = "") -> Iterator[None]:
    """Context that ends the command if a file or an argument is wrong. It prints an error that starts with `begin`."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise _refused(f"{begin}{error}") from None


def _refused(text: str) -> typer.Exit:
    """Print why a command is refused, and return the exception to raise."""
    typer.echo(text, err=True)
    return typer.Exit(2)


def main() -> None:
    """Run the command `horovod-partial`."""
    try:
        app()
    except SystemExit:
        if not _programs:
            raise
    for program in _programs:
        program()
