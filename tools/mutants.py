"""Plant the defects of tests/cpp/mutants.toml and tests/single/mutants.toml, one at a time, and see that tests catch each.

`python tools/mutants.py DIRECTORY INFO` works on a copy of the sources in DIRECTORY, so that the checkout stays as it
is; INFO is what tools/horovod_info.py has written. A defect is caught by a test that fails, crashes or does not end in
time: an executable in C++; in Python a file of tests/single, or one test of tests/parallel. Those in Python need the
extensions of the checkout. Every test that the list names for a defect must catch it.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import tomllib

TOP = Path(__file__).resolve().parent.parent
LISTS = (TOP / "tests" / "cpp" / "mutants.toml", TOP / "tests" / "single" / "mutants.toml")
SOURCES = (
    *("CMakeLists.txt", "cmake", "cpp", "tests/cpp"),
    *("horovod_partial", "pyproject.toml", "tests/conftest.py", "tests/single", "tests/parallel"),
    *("README.md", "docs", "benchmarks", "examples"),  # for the test of pages
)
SHORTEST_LIMIT_SECONDS = 60


class MutantError(Exception):
    """The list, or the tests without a defect, are not in order."""


class Mutant(NamedTuple):
    """One defect: where `find` stands once in `file`, `replace` is put, or nothing."""

    file: str
    name: str
    find: str
    caught_by: list[str]
    replace: str = ""

    def applied_to(self, text: str) -> str:
        """Give `text` with the defect."""
        count = text.count(self.find)
        if count != 1:
            raise MutantError(f"{self.name}: what it replaces stands {count} times in {self.file}, not once.")
        return text.replace(self.find, self.replace)


def read_list(only: list[str]) -> list[Mutant]:
    """Give the list's mutants in the order of their files, or those named in `only`."""
    lists = [tomllib.loads(path.read_text()) for path in LISTS]
    mutants = [
        Mutant(file, name, **entry)
        for files in lists
        for file, entries in files.items()
        for name, entry in entries.items()
    ]
    names = [mutant.name for mutant in mutants]
    if len(set(names)) < len(names):
        raise MutantError("Two mutants have the same name.")
    if unknown := set(only) - set(names):
        raise MutantError(f"There is no {', '.join(sorted(unknown))}.")
    for mutant in mutants:
        if mutant.applied_to((TOP / mutant.file).read_text()) == (TOP / mutant.file).read_text():
            raise MutantError(f"{mutant.name} changes nothing.")
        if not mutant.caught_by:
            raise MutantError(f"{mutant.name} names no test that must catch it.")
    return sorted((mutant for mutant in mutants if not only or mutant.name in only), key=lambda mutant: mutant.file)


def copy_sources(directory: Path) -> None:
    """Copy what is built; files that have not changed keep their times, so that they are not compiled again."""
    for name in SOURCES:
        paths = [TOP / name] if (TOP / name).is_file() else (TOP / name).rglob("*")
        for path in paths:
            copy = directory / path.relative_to(TOP)
            if (
                not path.is_file()
                or "__pycache__" in path.parts
                or (copy.exists() and copy.read_bytes() == path.read_bytes())
            ):
                continue
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def outcome_of(command: list[str], limit: float | None, **options: Any) -> str:
    """Run a test, for `limit` seconds at most, and give what went wrong; empty if nothing did."""
    try:
        result = subprocess.run(command, stdout=subprocess.DEVNULL, timeout=limit, check=False, **options)
    except subprocess.TimeoutExpired:
        return "hangs"
    return "" if result.returncode == 0 else "fails"


class Build:
    """A build of the copied sources, optimized only a little: what is compiled is run for seconds."""

    def __init__(self, directory: Path, info: Path) -> None:
        self._directory = directory / "build"
        flags = ["-DCMAKE_CXX_FLAGS_RELEASE=-O1", "-DHOROVOD_PARTIAL_TESTS=ON", "-DHOROVOD_PARTIAL_WERROR=OFF"]
        info_flags = [f"-DHOROVOD_PARTIAL_INFO={info}", f"-DPython_EXECUTABLE={sys.executable}"]
        self._run("cmake", "-S", str(directory), "-B", str(self._directory), "-G", "Ninja", *flags, *info_flags)

    def _run(self, *command: str) -> None:
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if result.returncode != 0:
            raise MutantError(f"{' '.join(command)} failed:\n{result.stdout}")

    def make(self, targets: list[str], jobs: int) -> None:
        """Build test executables."""
        self._run("cmake", "--build", str(self._directory), "-j", str(jobs), "--target", *targets)

    def run(self, test: str, limit: float | None = None) -> str:
        """Run a test executable: see `outcome_of`."""
        # Shuffled, because a defect that only the last suite sees would be found late. The order is always the same one.
        shuffle = ["--gtest_shuffle", "--gtest_random_seed=1"]
        command = [str(self._directory / test), "--gtest_fail_fast", "--gtest_brief=1", *shuffle]
        return outcome_of(command, limit, stderr=subprocess.DEVNULL)


class Interpreter:
    """Runs tests of the copied sources in Python, where nothing is built."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def make(self, targets: list[str], jobs: int) -> None:
        """Do nothing."""

    def run(self, test: str, limit: float | None = None) -> str:
        """Run a file of tests, or a single test: see `outcome_of`."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", test]
        environment = os.environ | {"PYTHONPATH": str(self._directory), "PYTHONDONTWRITEBYTECODE": "1"}
        return outcome_of(command, limit, cwd=self._directory, env=environment)


def survivors_among(mutants: list[Mutant], directory: Path, build: Build | Interpreter, jobs: int) -> list[str]:
    """Plant each mutant, say what becomes of it, and give those that a test has not caught."""
    tests = sorted({test for mutant in mutants for test in mutant.caught_by})
    build.make(tests, jobs)
    limits = {}
    for test in tests:
        begin = time.monotonic()
        if build.run(test):
            raise MutantError(f"{test} fails without any mutant.")
        limits[test] = max(SHORTEST_LIMIT_SECONDS, 5 * (time.monotonic() - begin))
    survivors = []
    for mutant in mutants:
        begin = time.monotonic()
        path = directory / mutant.file
        text = path.read_text()
        path.write_text(mutant.applied_to(text))
        try:
            build.make(mutant.caught_by, jobs)
            outcomes = {test: build.run(test, limits[test]) for test in mutant.caught_by}
        except MutantError as error:
            print(error, flush=True)  # the others are planted all the same
            outcomes = {"the compiler": ""}
        finally:
            path.write_text(text)
        verdict = ", ".join(f"{test} {outcome or 'PASSES'}" for test, outcome in outcomes.items())
        print(f"{mutant.name}: {verdict}; {time.monotonic() - begin:.0f} s", flush=True)
        if not all(outcomes.values()):
            survivors.append(mutant.name)
    return survivors


def main() -> None:
    """Exit with status 1 if a mutant survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where the copy is built; it is kept for the next time")
    parser.add_argument("info", type=Path, help="what tools/horovod_info.py has written")
    parser.add_argument("--list", action="store_true", help="name the mutants, and do nothing else")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="plant this one; may be repeated")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time")
    arguments = parser.parse_args()
    try:
        mutants = read_list(arguments.only)
        if arguments.list:
            for mutant in mutants:
                print(f"{mutant.name} ({mutant.file}): {', '.join(mutant.caught_by)}")
            return
        directory, survivors = arguments.directory.resolve(), []
        copy_sources(directory)
        in_python = [mutant for mutant in mutants if mutant.file.endswith(".py")]
        in_cpp = [mutant for mutant in mutants if mutant not in in_python]
        if in_python:
            survivors += survivors_among(in_python, directory, Interpreter(directory), arguments.jobs)
        if in_cpp:
            survivors += survivors_among(in_cpp, directory, Build(directory, arguments.info.resolve()), arguments.jobs)
    except MutantError as error:
        sys.exit(f"mutants: {error}")
    if survivors:
        sys.exit(f"mutants: {len(survivors)} of {len(mutants)} survive: {', '.join(survivors)}")
    print(f"All {len(mutants)} mutants are caught.")


if __name__ == "__main__":
    main()
