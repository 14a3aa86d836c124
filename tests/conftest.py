"""Options of the whole test suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--matrix",
        choices=("default", "full"),
        default="default",
        help="default: 4 ranks over both transports, and a smoke file with 2 and 8; full: 2, 4 and 8 ranks, long versions",
    )
    parser.addoption("--transport", choices=("gloo", "mpi"), help="run parallel tests over this transport only")
