"""`horovod-partial run`: the command, and what it makes of modules, on one rank."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
import horovod.torch as hvd
hvd.init()
print(__name__, sys.argv[1:], hvd.init.__module__, hvd.allreduce.__module__)
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "horovod_partial", "run", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_a_script_and_a_module(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    for which in (["program.py"], ["-m", "program"]):
        done = run(tmp_path, *which, "-m", "--sync", "x")
        assert done.stdout == "__main__ ['-m', '--sync', 'x'] horovod_partial.runtime.runtime horovod.torch.mpi_ops\n"
        assert done.returncode == 0, done.stderr
        told = "horovod-partial: of horovod.torch these are ours: DistributedOptimizer, add_process_set"
        assert done.stderr.startswith(told)


def test_a_program_may_import_ours_first(tmp_path: Path) -> None:
    lines = ["import horovod_partial.torch", PROGRAM, "print(horovod_partial.settings.settings().sync)"]
    (tmp_path / "program.py").write_text("\n".join(lines))
    first, policy = run(tmp_path, "--sync", "solo", "program.py").stdout.splitlines()
    assert "horovod_partial.runtime.runtime" in first
    assert policy == "solo"


def test_modules_are_whole(tmp_path: Path) -> None:
    """Star imports bring no names of ours, modules that are not public are Horovod's, and data of packages are found."""
    lines = [
        "import importlib.resources, pickle",
        "flush = 'mine'",
        "from horovod.torch import *",
        "import horovod.torch.optimizer as private",
        "class Saved: pass",
        "pickle.dumps(Saved())",
        "has = importlib.resources.files('horovod.torch').joinpath('__init__.py').is_file()",
        "print(flush, init.__module__, hasattr(private, '_DistributedOptimizer'), has, __file__)",
    ]
    (tmp_path / "program.py").write_text("\n".join(lines))
    done = run(tmp_path, "program.py")
    where = str(tmp_path / "program.py")
    assert done.stdout.split() == ["mine", "horovod_partial.runtime.runtime", "True", "True", where]


def test_exit_status_and_exceptions_are_the_programs(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM + "sys.exit(int(sys.argv[1]))")
    assert [run(tmp_path, "program.py", status).returncode for status in "07"] == [0, 7]
    (tmp_path / "program.py").write_text("raise EOFError('no more')")
    done = run(tmp_path, "program.py")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert done.stderr.endswith("EOFError: no more\n")


def test_a_program_ends_with_its_last_thread(tmp_path: Path) -> None:
    """Or exit handler; idle workers of a pool that nobody shuts down are no reason to wait."""
    lines = [
        "import atexit, concurrent.futures, threading, time",
        "concurrent.futures.ThreadPoolExecutor(1).submit(int)",
        "threading.Thread(target=lambda: (time.sleep(0.5), print(hvd.size()))).start()",
        "atexit.register(lambda: print(hvd.rank()))",
    ]
    (tmp_path / "program.py").write_text(PROGRAM + "\n".join(lines))
    done = run(tmp_path, "program.py")
    assert done.stdout.splitlines()[-2:] == ["1", "0"], done.stderr


def test_what_is_wrong_is_said_in_a_line(tmp_path: Path) -> None:
    done = run(tmp_path, "nothing.py")
    assert (done.returncode, done.stderr) == (2, "there is no file nothing.py\n")
    done = run(tmp_path, "--sync", "magic", "nothing.py")
    assert done.returncode == 2
    assert done.stderr.startswith("--sync: ")
