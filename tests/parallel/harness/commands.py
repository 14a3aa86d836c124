"""What a document tells its reader to type, checked without being run: programs and files exist, and options are known."""

import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import typer
from horovod.runner import launch
from packaging.requirements import Requirement

from harness.documents import ROOT
from horovod_partial import cli
from horovod_partial.settings import PREFIX, Settings

READERS_OWN = {"train.py", "train"}  # what only the reader has


def commands(text: str) -> list[list[str]]:
    """The words of each command of a block, without its comments."""
    lines = text.replace("\\\n", " ").replace(" && ", "\n").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def check(command: Sequence[str]) -> None:
    """Fails if a command could not be meant as it stands there."""
    program, *arguments = command
    if setting := re.match(r"(\w+)=", program):
        name = setting[1].removeprefix(PREFIX)
        assert name == setting[1] or name.lower() in Settings.model_fields, f"{setting[1]} is no setting"
        check(arguments)
        return
    known = program in _CHECKS or (ROOT / program).is_file()
    assert known, f"{program} is no file of the repository, and {Path(__file__).name} has no rule for it"
    _CHECKS.get(program, _by_help)(command)


def _by_help(command: Sequence[str]) -> None:
    """A program's own help names all options that it is given."""
    options = [word.partition("=")[0] for word in command if re.match(r"--?[a-z]", word)]
    if not options:
        return
    first = next(place for place, word in enumerate(command) if word.startswith("-"))
    asked = subprocess.run(
        [*command[:first], "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    unknown = [option for option in options if not re.search(rf"(?<![\w-]){option}(?![\w-])", asked.stdout)]
    assert not unknown, f"{shlex.join(command[:first])} has no {', '.join(unknown)}"


def _make(command: Sequence[str]) -> None:
    subprocess.run([*command, "--dry-run"], cwd=ROOT, capture_output=True, timeout=60, check=True)


def _pip(command: Sequence[str]) -> None:
    first = next((place for place, word in enumerate(command) if word.startswith("-")), 2)
    _by_help(["pip", command[1], *command[first:]])
    for word in command[2:]:
        if not word.startswith("-") and not (ROOT / word).exists():
            Requirement(word)


def _python(command: Sequence[str]) -> None:
    program = command[2] if command[1] == "-m" else command[1]
    if program not in READERS_OWN:
        assert (ROOT / program).is_file(), f"there is no {program}"
        _by_help([sys.executable, *command[1:]])


def _horovodrun(command: Sequence[str]) -> None:
    with patch.object(sys, "argv", list(command)):
        check(launch.parse_args().command)


def _ours(command: Sequence[str]) -> None:
    """The command line takes it; and what `run` is to start is there."""
    group = typer.main.get_command(cli.app)
    name = command[1]
    context = group.commands[name].make_context(name, list(command[2:]))
    if name == "run":
        _python(["python", context.params["program"]])


def _mpirun(command: Sequence[str]) -> None:
    """Each of its parts starts a program of ours or of Python's; options are those of many an MPI."""
    parts = shlex.join(command).split(" : ")
    for words in map(shlex.split, parts):
        check(words[next(place for place, word in enumerate(words) if word in ("python", "horovod-partial")) :])


def _kubectl(command: Sequence[str]) -> None:
    for option, word in pairwise(command):
        if option == "-f" and not word.startswith("-"):
            assert (ROOT / word).is_file(), f"there is no {word}"


def _timeout(command: Sequence[str]) -> None:
    check(command[2:])


_CHECKS: dict[str, Callable[[Sequence[str]], None]] = {
    "horovod-partial": _ours,
    "horovodrun": _horovodrun,
    "kubectl": _kubectl,
    "make": _make,
    "mpirun": _mpirun,
    "pip": _pip,
    "python": _python,
    "timeout": _timeout,
}
