"""Options of the whole test suite."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--matrix",
        choices=("default", "full"),
        default="default",
        help="default: what `make test` runs; full: more ranks, both transports for everything, long versions",
    )
    parser.addoption("--transport", choices=("gloo", "mpi"), help="run parallel tests over this transport only")
    parser.addoption("--ranks", type=int, help="run parallel tests with so many ranks only")
    parser.addoption("--device", default="cpu", help="where parallel tests have their tensors: cpu, or cuda")
    parser.addoption("--hosts", type=int, help="spread the ranks of parallel tests over so many hosts, as root")
