"""Gives a test that takes `world` to every rank of a `horovodrun`, and reports here what became of it there.

The same file is read by the pytest that the user has started and by the pytests on the ranks (see `harness.rank`). Here
a test function is not called: its outcome on all ranks is asked for. There it is called, with a `World`.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from harness import fronts, trainers
from harness import world as ranks_world
from harness.fronts import Front, front_of
from harness.launch import Launch
from harness.matrix import Setup, setups_of
from harness.trainers import Trainer, trainer_of
from harness.whole_jobs import Job
from harness.world import World

from horovod_partial.settings import settings

_launches = pytest.StashKey[dict[Setup, Launch]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_launches] = {}
    if ranks_world.setup is not None and config.getoption("device") != "cpu":
        torch.set_default_device(config.getoption("device"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    def setups(**defaults: Any) -> list[Setup]:
        asked = setups_of(metafunc.definition, metafunc.config, **defaults)
        return [setup for setup in asked if ranks_world.setup in (None, setup)]

    for argument, launches, marks in (
        ("front", fronts.FRONTS, fronts.MARKS),
        ("trainer", trainers.TRAINERS, trainers.MARKS),
    ):
        if argument in metafunc.fixturenames:
            mark = metafunc.definition.get_closest_marker("trainers")
            cases = [
                pytest.param(name, setup, id=f"{name}-{setup}", marks=marks.get(name, ()))
                for name in (mark.args if mark else launches)
                for setup in setups(**launches[name])
            ]
            metafunc.parametrize((argument, "world"), cases, indirect=True)
            return
    for argument in ("world", "job"):
        if argument in metafunc.fixturenames:
            metafunc.parametrize(argument, setups(), ids=str, indirect=True)


@pytest.fixture
def front(request: pytest.FixtureRequest) -> Front | None:
    """The front end that a case is run for; None in the process that asks for the outcome."""
    return front_of(request.param) if ranks_world.setup is not None else None


@pytest.fixture
def trainer(request: pytest.FixtureRequest) -> Trainer | None:
    """The optimizer or tape that a case is run for; None in the process that asks for the outcome."""
    return trainer_of(request.param) if ranks_world.setup is not None else None


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
    torch.manual_seed(0)  # and with the same models
    world.barrier()  # all ranks begin together
    ranks_world.reporter.write(request.node.nodeid, "running")
    yield world


@pytest.fixture
def heals() -> Iterator[None]:
    """As for users: tests raise otherwise where replicas have parted."""
    settings().heal = "1"
    yield
    settings().heal = "raise"


@pytest.fixture
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Job]:
    """A job of whole programs, which ends with the test."""
    setup: Setup = request.param
    if setup.unavailable:
        pytest.skip(setup.unavailable)
    job = Job(setup, tmp_path)
    yield job
    job.close()


def _setup_of(item: pytest.Item) -> Setup | None:
    callspec = getattr(item, "callspec", None)
    setup = callspec.params.get("world") if callspec else None
    return setup if isinstance(setup, Setup) else None  # with --transport there may be nothing left to run on


def _turn_of(item: pytest.Item) -> int:
    mark = item.get_closest_marker("turn")
    return {"first": 0, "last": 2}[mark.args[0]] if mark else 1


def _is_for_the_full_matrix(item: pytest.Item) -> bool:
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    setup = parameters.get("world") or parameters.get("job")
    marks = item.iter_markers("full_matrix")
    where = {setup.transport, setup.framework} if isinstance(setup, Setup) else set()
    return any(not mark.args or not where.isdisjoint(mark.args) for mark in marks)


def _chosen(items: Sequence[pytest.Item], full: bool) -> Iterator[pytest.Item]:
    """The cases of a run. The full one has all on the setups of the default run, but for jobs, and a third of the rest."""
    seen: Counter[object] = Counter()  # of each test, on each setup
    for item in items:
        setup = _setup_of(item)
        usual = setup is None or setup.usual
        by_default = usual and not _is_for_the_full_matrix(item)
        test = (by_default, item.path, getattr(item, "originalname", item.name), setup)
        number = seen[test]
        seen[test] += 1
        mark = item.get_closest_marker("one_in")
        whole = usual and "job" not in getattr(item, "fixturenames", ())
        step = (1 if whole else 3) if full else mark.args[0] if mark else 1
        if (full or by_default) and number % step == 0:
            yield item


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Chooses the cases of the matrix. Tests of one setup come together, whatever file they are in: they share a launch.

    Those that run whole programs come last, when all launches are over.
    """
    if ranks_world.setup is not None:
        return  # ranks are told which tests to run
    chosen = dict.fromkeys(_chosen(items, config.getoption("matrix") == "full"))
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen
    order: dict[object, int] = {}
    for item in items:
        order.setdefault(_setup_of(item) or item.path, len(order))

    def place(item: pytest.Item) -> tuple[bool, int, int]:
        setup = _setup_of(item)
        runs_programs = setup is None and item.path.is_relative_to(HERE)
        return runs_programs, order[setup or item.path], _turn_of(item)

    items.sort(key=place)


def pytest_collection_finish(session: pytest.Session) -> None:
    if ranks_world.setup is not None:
        return
    tests: dict[Setup, list[str]] = {}
    for item in session.items:
        setup = _setup_of(item)
        runs = all(mark.kwargs.get("run", True) for mark in item.iter_markers("xfail"))
        if setup is not None and setup.unavailable is None and runs:
            tests.setdefault(setup, []).append(item.nodeid)
    given = {name: session.config.getoption(name) for name in ("matrix", "transport", "ranks", "device", "hosts")}
    arguments = [f"--{name}={value}" for name, value in given.items() if value]
    for setup, node_ids in tests.items():
        session.config.stash[_launches][setup] = Launch(setup, node_ids, session.config.rootpath, arguments)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    setup = _setup_of(pyfuncitem)
    if setup is None or ranks_world.setup is not None:
        return None
    outcome = pyfuncitem.config.stash[_launches][setup].outcome(pyfuncitem.nodeid)
    if outcome.kind == "skipped":
        pytest.skip(outcome.text)
    if outcome.kind == "failed":
        pytest.fail(outcome.text, pytrace=False)
    return True


def pytest_sessionfinish(session: pytest.Session) -> None:
    for launch in session.config.stash[_launches].values():
        launch.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    launches = config.stash[_launches]
    if launches:
        terminalreporter.write_line("seconds of each launch, and the number of its starts:")
    for setup, launch in launches.items():
        terminalreporter.write_line(f"  {launch.seconds:4.0f} s {launch.starts} {setup.framework} {setup}")
