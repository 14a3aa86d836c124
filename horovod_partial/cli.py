"""The command `horovod-partial`."""

from __future__ import annotations

import subprocess
import sys

import typer
from rich.console import Console
from rich.table import Table

from horovod_partial import __version__

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Partial collectives for a stock Horovod.")

# In a process of its own: attaching cannot be undone, and Horovod may abort where MPI is broken.
SELF_TEST = """
import torch
import horovod_partial.torch as hvd
hvd.init()
x = torch.ones(3)
hvd.partial_allreduce_(x, name="check", op=hvd.Sum, sync=hvd.Solo())
assert x.tolist() == [hvd.size()] * 3, x
hvd.shutdown()
"""


@app.callback(invoke_without_command=True)
def version_option(
    version: bool = typer.Option(False, "--version", help="Show the version and exit.", is_eager=True),
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
def check() -> None:
    """Show what this installation can do, and try it: attach, initialise, and reduce one tensor in one process."""
    try:
        from horovod_partial import _build_info as built
    except ImportError:
        typer.echo("horovod_partial has not been built: run `pip install --no-build-isolation .`", err=True)
        raise typer.Exit(1) from None

    def mark(available: bool) -> str:
        return "yes" if available else "no"

    table = Table(title=f"horovod_partial {__version__} for Horovod {built.HOROVOD_VERSION}")
    table.add_column("")
    table.add_column("available")
    for framework in ("torch", "tensorflow"):
        version = built.FRAMEWORKS.get(framework)
        # TensorFlow's front end is not there yet, whatever Horovod was built for.
        table.add_row(framework, version if version and framework == "torch" else "no")
    for transport, feature in (("MPI", "mpi"), ("Gloo", "gloo")):
        table.add_row(f"rounds over {transport}", mark(feature in built.FEATURES))
    table.add_row("rounds of GPU tensors", "experimental" if "cuda" in built.FEATURES else "no")
    for policy in ("Full", "Solo", "Majority", "Quorum", "GroupAverage", "PartialReduce", "WeightedAverage"):
        table.add_row(f"policy {policy}", "yes")
    failure = _self_test()
    table.add_row("attach self-test", "FAILED" if failure else "passed")
    Console().print(table)
    if failure:
        typer.echo(failure, err=True)
        raise typer.Exit(1)


def _self_test() -> str:
    """What went wrong, or nothing."""
    command = [sys.executable, "-c", SELF_TEST]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return "the self-test did not end within a minute"
    return result.stderr if result.returncode != 0 else ""


@app.command()
def replay(path: str = typer.Argument(help="A file that HOROVOD_PARTIAL_DECISION_LOG made.")) -> None:
    """Replay recorded decisions with this version, and tell whether they come out the same."""
    from horovod_partial import _core

    try:
        result = _core.replay(path)
    except (ValueError, RuntimeError) as error:
        typer.echo(f"{path}: {error}", err=True)
        raise typer.Exit(2) from None
    if result.difference:
        typer.echo(f"after {result.rounds} rounds a decision came out otherwise\n{result.difference}", err=True)
        raise typer.Exit(1)
    typer.echo(f"{result.rounds} rounds in {result.decisions} decisions, all the same")


@app.command()
def plan(
    path: str = typer.Argument(help="A file that `optimizer.fusion_plan.save` made."),
    latency_ms: float | None = typer.Option(None, min=0.0, help="Start-up of a message, in place of the measured one."),
    ns_per_byte: float | None = typer.Option(None, min=0.0, help="Time of a byte, in place of the measured one."),
) -> None:
    """Compare the rules of merged gradients on the times that a plan was made from."""
    from horovod_partial import fusion

    try:
        saved = fusion.FusionPlan.load(path)
    except (OSError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    if saved.cost is None and (latency_ms is None or ns_per_byte is None):
        typer.echo(f"{path} has no cost of messages ({saved.reason}); give --latency-ms and --ns-per-byte", err=True)
        raise typer.Exit(2)
    measured = saved.cost or fusion.MessageCost(0.0, 0.0)
    cost = fusion.MessageCost(
        measured.latency if latency_ms is None else latency_ms / 1e3,
        measured.seconds_per_byte if ns_per_byte is None else ns_per_byte / 1e9,
    )
    plans = {rule: saved.by_rule(rule, cost) for rule in fusion.RULES}
    table = Table(title=f"{len(saved.gradients)} gradients, {sum(saved.nbytes) / 1e6:.1f} MB", title_justify="left")
    for column in ("rule", "messages", "ms", "over exact"):
        table.add_column(column, justify="left" if column == "rule" else "right")
    best = plans["exact"].duration(cost)
    for rule, made in plans.items():
        duration = made.duration(cost)
        table.add_row(rule, str(len(made.messages)), f"{1e3 * duration:.2f}", f"{duration / best:.3f}")
    Console().print(table)
    typer.echo("Times are from the first gradient to the last result.")


def main() -> None:
    """The console script."""
    app()
