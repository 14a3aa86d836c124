"""Command lines, tables and JSON files that look alike in every benchmark."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.files import replace
from harness.launch import default_transport


def arguments(description: str | None, *, ranks: int, device: bool = False) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has, `--ranks`, `--transport` and `--json`; some have `--device` and `--quick`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--ranks", type=int, default=ranks, help="processes to start")
    parser.add_argument("--transport", choices=["mpi", "gloo"], default=default_transport(), help="of Horovod")
    if device:
        parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where PyTorch's tensors lie")
        parser.add_argument("--quick", action="store_true", help="measure less: within 45 s with 4 ranks on one GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    return parser


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; all but its first column hold numbers."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def write_json(file: Path | None, figures: dict[str, Any]) -> None:
    """Write the figures, if a file was asked for."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace(file, json.dumps(figures, indent=2) + "\n")
