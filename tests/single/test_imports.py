"""Import: what is checked, and what is said where it does not fit. Also operations before `init`."""

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import horovod.torch as theirs
import pytest
import torch
from interpreter import run_apart, run_command

import horovod_partial.torch as hvd
from horovod_partial import _attach
from horovod_partial import _build_info as built
from horovod_partial.runtime import build
from horovod_partial.torch.operations import runtime

OURS = Path(sys.executable).parent / "horovod-partial"


@pytest.fixture
def mpi_ops() -> SimpleNamespace:
    names = ("mpi", "gloo", "nccl", "cuda", "rocm", "ddl", "ccl")
    return SimpleNamespace(**{f"{name}_built": lambda name=name: name in built.FEATURES for name in names})


def test_the_right_build(mpi_ops: SimpleNamespace) -> None:
    build.check_versions("torch")
    build.check_features(mpi_ops)


def test_another_version_of_the_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "1.2.3")
    told = "built for torch .*, but 1.2.3 is installed; .*`python tools/install_horovod.py --gloo.*`, then `pip"
    with pytest.raises(ImportError, match=told):
        build.check_versions("torch")


def test_the_command_that_checks_says_what_to_do_after_an_upgrade(tmp_path: Path) -> None:
    # Doubles of upgraded frameworks, in which Horovod's library would not load.
    for framework in ("torch", "tensorflow"):
        (tmp_path / f"{framework}.py").write_text("__version__ = '9.9'\n")
    done = run_command(OURS, "check", seconds=110, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    told = [line for line in done.stderr.splitlines() if line]
    assert len(told) == 2, done.stderr
    for line, framework in zip(told, ("torch", "tensorflow"), strict=True):
        assert re.match(rf"ImportError: .* for {framework} .*, but 9.9 is installed; .*install_horovod.py", line)


def test_an_unedited_program_is_told_what_to_do_after_an_upgrade(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("__version__ = '9.9'\n")  # a double, in which Horovod's library would not load
    (tmp_path / "train.py").write_text("import horovod.torch\n")
    done = run_command(OURS, "run", "train.py", cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode != 0
    assert re.search(r"(?m)^ImportError: .* for torch .*, but 9.9 is installed; .*install_horovod.py", done.stderr)


def test_another_version_of_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.27.0")
    with pytest.raises(ImportError, match=r"built for Horovod 0.28.1, but 0.27.0 is installed; .*install_horovod.py"):
        build.check_versions("torch")


def test_other_features(mpi_ops: SimpleNamespace) -> None:
    mpi_ops.nccl_built = lambda: True
    with pytest.raises(ImportError, match=r"built for a Horovod with .*, but the installed one has .*nccl"):
        build.check_features(mpi_ops)


def test_a_framework_that_was_not_there() -> None:
    with pytest.raises(ImportError, match="was built where Horovod had no mxnet"):
        build.check_versions("mxnet")


def test_attaching_to_something_else_changes_nothing() -> None:
    for library in ("/lib/x86_64-linux-gnu/libc.so.6", "/nowhere/mpi_lib.so"):
        with pytest.raises(_attach.AttachError):
            _attach.attach(library, waits_are_told=False)
    assert hvd.Solo() == hvd.Solo()


def test_attaching_twice_is_attaching_once() -> None:
    _attach.attach(runtime.library, waits_are_told=False)
    _attach.attach(runtime.library, waits_are_told=False)


def test_importing_the_package_imports_no_framework() -> None:
    imports = "import sys, horovod_partial, horovod_partial.policies, horovod_partial.settings"
    assert run_apart(f"{imports}; print('torch' in sys.modules)").stdout.strip() == "False"


@pytest.mark.parametrize(("backend", "other"), [("torch", "tensorflow"), ("tensorflow", "torch")])
def test_keras_imports_the_framework_of_its_backend(backend: str, other: str) -> None:
    program = (
        f"import sys, horovod_partial.keras as hvd, horovod.{backend} as theirs; "
        f"print({other!r} in sys.modules, hvd.rank is theirs.rank, all(hasattr(hvd, name) for name in hvd.__all__))"
    )
    assert run_apart(program, KERAS_BACKEND=backend).stdout.split() == ["False", "True", "True"]


def test_a_backend_of_keras_that_horovod_does_not_know() -> None:
    program = "import keras; keras.backend.backend = lambda: 'jax'; import horovod_partial.keras"
    assert "ImportError: Keras's backend is jax" in run_apart(program).stderr


def test_operations_before_init() -> None:
    for sync in ("solo", "full"):
        with pytest.raises(ValueError, match="Horovod has not been initialized"):
            hvd.partial_allreduce(torch.zeros(1), name="x", sync=sync)
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match="Horovod has not been initialized"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), sync="solo")
    hvd.shutdown()  # does nothing
    for call in (hvd.flush, lambda: hvd.synchronize(0), lambda: hvd.poll(0), lambda: hvd.round_info(0)):
        with pytest.raises(ValueError, match="Horovod has not been initialized"):
            call()
    with pytest.raises(hvd.HorovodInternalError, match="Horovod has not been initialized"):
        hvd.join()  # Horovod's own error


def test_everything_of_horovods_is_there() -> None:
    names = {name for name in dir(theirs) if not name.startswith("_")}
    assert names <= set(hvd.__all__)
    assert all(hasattr(hvd, name) for name in hvd.__all__)
    assert hvd.allreduce is theirs.allreduce
    assert hvd.elastic is not theirs.elastic, "its restart would pass our handshake by"


def test_the_command_that_checks_tries_every_framework() -> None:
    done = run_command(OURS, "check", seconds=110)
    assert done.returncode == 0, done.stdout + done.stderr
    for framework, version in built.FRAMEWORKS.items():
        assert re.search(rf"{framework} .*{re.escape(version)}", done.stdout)
        assert re.search(rf"attach self-test, {framework} .*passed", done.stdout)
