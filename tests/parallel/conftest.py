"""Gives a test that takes `world` to every rank of a `horovodrun`, and reports here what became of it there.

The same file is read by the pytest that the user has started and by the pytests on the ranks (see `harness.rank`). Here
a test function is not called: its outcome on all ranks is asked for. There it is called, with a `World`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness import world as ranks_world
from harness.launch import Launch
from harness.matrix import Setup, setups_of
from harness.merging import known_cost  # noqa: F401 (a fixture)
from harness.world import World

_launches = pytest.StashKey[dict[tuple[Path, Setup], Launch]]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "launch(ranks, full_ranks, transports, environment, label, double, framework): how a parallel test is launched",
    )
    config.addinivalue_line("markers", "full_matrix: runs with --matrix=full only")
    config.stash[_launches] = {}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for argument in ("world", "job"):
        if argument in metafunc.fixturenames:
            setups = setups_of(metafunc.definition, metafunc.config)
            if ranks_world.setup is not None:
                setups = [setup for setup in setups if setup == ranks_world.setup]
            metafunc.parametrize(argument, setups, ids=str, indirect=True)


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World | None]:
    """One rank's view of the test; None in the process that asks for the outcome."""
    setup: Setup = request.param
    if setup.unavailable:
        pytest.skip(setup.unavailable)
    if ranks_world.setup is None:
        yield None
        return
    world = World(request.node.nodeid, setup, request.config.getoption("matrix") == "full")
    world.barrier()  # all ranks begin together
    ranks_world.reporter.write(request.node.nodeid, "running")
    yield world


def _setup_of(item: pytest.Item) -> Setup | None:
    callspec = getattr(item, "callspec", None)
    setup = callspec.params.get("world") if callspec else None
    return setup if isinstance(setup, Setup) else None  # with --transport there may be nothing left to run on


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of one launch come together, in the order of the file."""
    if config.getoption("matrix") != "full":
        left_out = [item for item in items if item.get_closest_marker("full_matrix")]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
    if ranks_world.setup is None:
        order: dict[object, int] = {}
        for item in items:
            order.setdefault((item.path, _setup_of(item)), len(order))
            order.setdefault(item.path, len(order))
        items.sort(key=lambda item: (order[item.path], order[(item.path, _setup_of(item))]))


def pytest_collection_finish(session: pytest.Session) -> None:
    if ranks_world.setup is not None:
        return
    tests: dict[tuple[Path, Setup], list[str]] = {}
    for item in session.items:
        setup = _setup_of(item)
        runs = all(mark.kwargs.get("run", True) for mark in item.iter_markers("xfail"))
        if setup is not None and setup.unavailable is None and runs:
            tests.setdefault((item.path, setup), []).append(item.nodeid)
    arguments = [f"--matrix={session.config.getoption('matrix')}"]
    for key, node_ids in tests.items():
        session.config.stash[_launches][key] = Launch(key[1], node_ids, session.config.rootpath, arguments)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    setup = _setup_of(pyfuncitem)
    if setup is None or ranks_world.setup is not None:
        return None
    outcome = pyfuncitem.config.stash[_launches][(pyfuncitem.path, setup)].outcome(pyfuncitem.nodeid)
    if outcome.kind == "skipped":
        pytest.skip(outcome.text)
    if outcome.kind == "failed":
        pytest.fail(outcome.text, pytrace=False)
    return True


def pytest_sessionfinish(session: pytest.Session) -> None:
    for launch in session.config.stash[_launches].values():
        launch.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    seconds: dict[str, float] = {}
    for report in (*terminalreporter.stats.get("passed", []), *terminalreporter.stats.get("failed", [])):
        for transport in ("gloo", "mpi"):
            if f"[{transport}-" in report.nodeid:
                seconds[transport] = seconds.get(transport, 0.0) + report.duration
    if seconds:
        starts = sum(launch.starts for launch in config.stash[_launches].values())
        figures = ", ".join(f"{transport} {figure:.0f} s" for transport, figure in seconds.items())
        terminalreporter.write_line(f"parallel tests: {figures}; {starts} launches of case files")
