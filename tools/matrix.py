"""Install and try horovod-partial on bare systems, with old and new frameworks: `make matrix`, as root.

    matrix.py [--only NAME ...]

Each of ENTRIES gets a Debian of its own by debootstrap, in which containers/install.sh installs everything, Horovod included. Then
examples train, and some of the parallel tests run. What has passed goes to docs/versions.json, with the versions that pip has
found; docs/versions.md is its table. An entry takes some 20 minutes on two cores. Horovods that were built are kept in the cache of
install_horovod.py.
"""

import argparse
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import date
from pathlib import Path
from typing import NamedTuple

from install_horovod import BINDING, cache_dir

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "matrix"
RESULTS = ROOT / "docs" / "versions.json"
TABLE = ROOT / "docs" / "versions.md"
MIRROR = "http://deb.debian.org/debian"
NAMESPACE = "MATRIX_HAS_ITS_MOUNTS"
SOURCE = "/usr/src/horovod-partial"
# What pip on this machine may need to reach its index, copied: its settings, certificates of this site, names of hosts.
SETTINGS = (
    "etc/pip.conf",
    "etc/xdg/pip",
    "root/.config/pip",
    "usr/local/share/ca-certificates",
    "etc/resolv.conf",
    "etc/hosts",
)
WHEELS = Path("/opt")  # where a site may keep wheels of its own, to which pip's settings point

TORCH_TESTS = ("test_smoke.py", "test_operations.py", "test_optimizer.py")
TENSORFLOW_TESTS = ("test_tensorflow.py",)


class Entry(NamedTuple):
    """A system, and the frameworks that are installed there."""

    suite: str  # of Debian
    requirements: tuple[str, ...]


OLD_TENSORFLOW = "tensorflow-cpu==2.15.1"  # which has Keras 2
OLD_NUMPY = "numpy<2"  # TensorFlow 2.15 was made before NumPy 2
ENTRIES = {
    # Without pins: the newest versions on the day of the run.
    "newest": Entry("bookworm", ("torch", "tensorflow")),
    "newest-torch": Entry("bookworm", ("torch",)),
    "newest-tensorflow": Entry("bookworm", ("tensorflow",)),
    "testing-debian": Entry("forky", ("torch",)),
    # With pins.
    "next-debian": Entry("trixie", ("torch==2.13.0", "tensorflow-cpu==2.21.0")),  # as requirements/frameworks.txt
    "oldest": Entry("bookworm", ("torch==2.7.0", OLD_TENSORFLOW, OLD_NUMPY)),  # older ones have another C++ ABI
    "oldest-torch": Entry("bookworm", ("torch==2.4.0", OLD_NUMPY)),
    "oldest-tensorflow": Entry("bookworm", (OLD_TENSORFLOW, OLD_NUMPY)),
}
SCRIPTS = {"forky": ("/usr/share/debootstrap/scripts/sid",)}  # for a suite that debootstrap does not know yet
COLUMNS = ("system", "Python", "PyTorch", "TensorFlow", "Keras", "NumPy", "tests passed", "date")


def base(suite: str) -> Path:
    """A bare Debian, made once."""
    tree = WORK / suite
    with locked(suite):
        if not tree.is_dir():
            unfinished = tree.with_suffix(".new")
            shutil.rmtree(unfinished, ignore_errors=True)
            command = ["debootstrap", "--variant=minbase", suite, unfinished, MIRROR, *SCRIPTS.get(suite, ())]
            subprocess.run(command, check=True)
            unfinished.rename(tree)
    return tree


@contextmanager
def mounted(tree: Path) -> Iterator[None]:
    """The kernel's file systems, the cache and this site's wheels are seen inside of the tree."""
    mounts: dict[str, list[str | Path]] = {
        "proc": ["-t", "proc", "proc"],
        "sys": ["-t", "sysfs", "sysfs"],
        "dev": ["--rbind", "--make-rprivate", "/dev"],
        "cache": ["--bind", cache_dir()],
        "opt": ["--bind", "--options=ro", WHEELS],
    }
    with ExitStack() as stack:
        for name, arguments in mounts.items():
            (tree / name).mkdir(exist_ok=True)
            subprocess.run(["mount", *arguments, tree / name], check=True)
            stack.callback(lambda place: subprocess.run(["umount", "--recursive", place], check=True), tree / name)
        yield


def inside(tree: Path, *command: str, folder: str = "/") -> subprocess.CompletedProcess[str]:
    """Run a command there, with pip's variables of this machine, and show what it says."""
    print("+", *command, flush=True)
    # pip reads its settings from the folders in XDG_CONFIG_DIRS, so they must be the same inside.
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name == "XDG_CONFIG_DIRS"}
    environment = kept | {
        "PATH": "/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "HOROVOD_PARTIAL_CACHE": "/cache",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMP_NUM_THREADS": "1",
    }
    line = ["chroot", str(tree), "/bin/sh", "-c", 'cd "$0" && exec "$@"', folder, *command]
    done = subprocess.run(line, check=False, stdout=subprocess.PIPE, text=True, env=environment)
    print(done.stdout, flush=True)
    if done.returncode != 0:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout)
    return done


def trial(tree: Path, entry: Entry) -> dict[str, str]:
    """Install everything and try it. Returns a row of the table.

    Raises:
        subprocess.CalledProcessError: something did not work; its output has been shown.
    """
    inside(tree, f"{SOURCE}/containers/install.sh", *entry.requirements)
    with_torch = any(one.startswith("torch") for one in entry.requirements)
    with_tensorflow = any(one.startswith("tensorflow") for one in entry.requirements)
    inside(tree, "pip", "install", "--quiet", "pytest", "pytest-timeout", "hypothesis")
    tests: list[str] = []
    for given, example, names in (
        (with_torch, "torch/quickstart.py", TORCH_TESTS),
        (
            with_tensorflow,
            "" if OLD_TENSORFLOW in entry.requirements else "tensorflow/custom_loop.py",
            TENSORFLOW_TESTS,
        ),
    ):
        if given:
            tests += [f"tests/parallel/{name}" for name in names]
        if given and example:
            inside(tree, "horovodrun", BINDING, "-np", "2", "python", f"{SOURCE}/examples/{example}")
    passed = ""
    if with_torch:  # without which the tests do not start
        # `python -m pytest` would find the package of the source folder, which is not built.
        passed = inside(tree, "pytest", "-q", *tests, folder=SOURCE).stdout.rstrip().rpartition("\n")[2]
    versions = {
        one["name"].lower().replace("_", "-"): one["version"]
        for one in json.loads(inside(tree, "pip", "list", "--format=json").stdout)
    }
    python = inside(tree, "python", "-c", "import platform; print(platform.python_version())").stdout.strip()
    release = (tree / "etc" / "debian_version").read_text().strip()
    values = (
        f"Debian {release}",
        python,
        versions.get("torch", ""),
        versions.get("tensorflow") or versions.get("tensorflow-cpu", ""),
        versions.get("keras", ""),
        versions["numpy"],
        passed.partition(" passed")[0].rpartition(" ")[2],
        date.today().isoformat(),
    )
    return dict(zip(COLUMNS, values, strict=True))


def copy_settings(tree: Path) -> None:
    """The tree reaches pip's index as this machine does, and apt accepts lists of packages that are more than a week old."""
    (tree / "etc/apt/apt.conf.d/99matrix").write_text('Acquire::Check-Valid-Until "false";\n')
    for name in SETTINGS:
        if Path("/", name).is_dir():
            shutil.copytree(Path("/", name), tree / name, dirs_exist_ok=True)
        elif Path("/", name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path("/", name), tree / name)


def copy_source(tree: Path) -> None:
    """The tree has what git knows of the source, as a clone would."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        target = tree / SOURCE.lstrip("/") / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)


def git(*arguments: str) -> str:
    """What git says of the source."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def commit() -> str:
    """The commit of the source, with a plus if something but the table has changed since."""
    others = [f":!{file.relative_to(ROOT)}" for file in (RESULTS, TABLE)]
    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--", ".", *others) else "")


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Let one of several matrices that run at once do this."""
    with (WORK / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write(name: str, row: dict[str, str] | None) -> None:
    """Put a row into docs/versions.json, or take the old one away, and make the table."""
    with locked("table"):
        rows = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
        rows = {**rows, name: row}
        results = {one: rows[one] for one in ENTRIES if rows.get(one)}
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")
        lines = [
            "<!-- Made by `make matrix` from versions.json. -->",
            "",
            "| " + " | ".join(COLUMNS) + " |",
            "|" + "---|" * len(COLUMNS),
            *("| " + " | ".join(row[column] or "-" for column in COLUMNS) + " |" for row in results.values()),
        ]
        TABLE.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(ENTRIES), default=list(ENTRIES), help="which entries")
    chosen = parser.parse_args().only
    if os.geteuid() != 0 or not shutil.which("debootstrap"):
        sys.exit("matrix: it needs root, and Debian's package debootstrap.")
    if NAMESPACE not in os.environ:
        # What is mounted and started ends with this process: a tree that is removed later has nothing of this machine in it.
        os.environ[NAMESPACE] = "1"
        own = ["--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"]
        os.execvp("unshare", ["unshare", *own, sys.executable, *sys.argv])
    failed = []
    WORK.mkdir(parents=True, exist_ok=True)
    cache_dir().mkdir(parents=True, exist_ok=True)
    for name in chosen:
        tree = WORK / f"{name}.root"
        shutil.rmtree(tree, ignore_errors=True)
        subprocess.run(["cp", "--archive", base(ENTRIES[name].suite), tree], check=True)
        copy_settings(tree)
        copy_source(tree)
        source = commit()
        write(name, None)  # what was true of an older version of this project
        try:
            with mounted(tree):
                write(name, trial(tree, ENTRIES[name]) | {"commit": source})
        except subprocess.CalledProcessError as error:
            print(f"matrix: {name}: `{' '.join(map(str, error.cmd))}` failed.", file=sys.stderr)
            failed.append(name)
        else:
            shutil.rmtree(tree)
    if failed:
        sys.exit(f"matrix: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
