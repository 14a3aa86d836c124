"""Every fenced block of the documents runs, or is checked: `harness/documents.py` has the comments that say which."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import commands, launch
from harness.documents import ROOT, Block, anchors, blocks, blocks_of, links
from harness.matrix import Setup, front_end, keras_front_end, keras_on_torch
from harness.world import World
from typer.exceptions import TyperException

BLOCKS = blocks()
SHELL_IN_EVERY_RUN = ("README.md",)  # each job takes seconds, and those of other pages are alike
# What commands of a document find in their folder, beside the program.
FOLDERS = ("benchmarks", "examples", "tools")


def framework(block: Block) -> str:
    """Whose ranks a block of Python runs on: that of what it, or its preamble, imports."""
    if block.detail == "keras_on_torch":
        return block.detail
    program = (block.preamble.read_text() if block.preamble else "") + block.text
    imports = re.search(r"import (keras|tensorflow|horovod_partial\.(keras|tensorflow))", program)
    return "tensorflow" if imports else "torch"


@pytest.fixture
def policy_of_keras() -> Iterator[None]:
    """The other tests of this launch have numbers of 32 bits again."""
    yield
    if keras := sys.modules.get("keras"):  # on the ranks
        keras.config.set_dtype_policy("float32")


def cases(chosen: Sequence[Block]) -> Any:
    return pytest.mark.parametrize("block", chosen, ids=str)


def python(where: str) -> Any:
    """The blocks of Python that run on the ranks of a framework."""
    programs = [block for block in BLOCKS if (block.rule, block.language) == ("run", "python")]
    return cases([block for block in programs if framework(block) == where])


def run(block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a block of Python in a namespace of its own. A line `...` of it stands for `loop()` of its preamble."""
    prepare(folder)
    monkeypatch.chdir(folder)
    text = "\n" * (block.line - 1) + re.sub(r"^\.\.\.", "loop()", block.text, flags=re.MULTILINE)
    parts = [(block.preamble.read_text(), block.preamble)] if block.preamble else []
    # What shares work must run under other policies, too.
    for policy in (
        ("hvd.WorkSharing()", "hvd.Full()") if block.file == "docs/work-sharing.md" else ("hvd.WorkSharing()",)
    ):
        namespace: dict[str, Any] = {"__name__": "__main__"}
        for program, file in [*parts, (text, ROOT / block.file)]:
            chosen = program.replace("hvd.WorkSharing()", policy)
            exec(compile(chosen, str(file), "exec"), namespace)  # noqa: S102 (that it runs is what is tested)
        namespace.get("afterwards", lambda: None)()


def prepare(folder: Path) -> None:
    for name in FOLDERS:
        (folder / name).symlink_to(ROOT / name)


@cases(BLOCKS)
def test_every_block_has_a_rule(block: Block) -> None:
    assert block.language in {*CHECKS, "text"}, f"{block}: no test knows the language `{block.language}`"
    rules = Path(commands.__file__).parent / "documents.py"
    assert block.rule, f"{block}: put a comment before it that says how it is tested; {rules} has them"
    assert not block.preamble or block.preamble.is_file(), f"{block}: there is no {block.preamble}"
    assert block.rule == "check" or block.language in ("python", "sh"), f"{block}: its language can only be checked"
    assert block.detail or block.rule == "run", f"{block}: say why it is not run"


def test_a_block_is_found_wherever_it_stands() -> None:
    text = "* item\n\n  <!-- run: torch -->\n  ```python\n  x = 1\n  ```\n\n```sh\nls\n```\n\n```{toctree}\n```\n\n```text\n```\n"
    assert list(blocks_of(text, "page.md")) == [
        Block("page.md", 5, "python", "x = 1\n", "run", "torch"),
        Block("page.md", 9, "sh", "ls\n", "", ""),
    ]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_a_page_that_is_not_on_the_site(page: str) -> None:
    for target, anchor in links((ROOT / page).read_text()):
        file = ROOT / (target or page)
        assert file.is_file(), f"{page}: there is no {target}"
        assert not anchor or anchor in anchors(file.read_text()), f"{page}: {target} has no {anchor}"


@pytest.mark.parametrize(
    "command",
    [
        "make no-such-target",
        "horovodrun -np 2 --no-such-option python train.py",
        "horovodrun -np 2 python no_such_file.py",
        "horovod-partial report recordings --no-such-option",
        "horovod-partial simulate trace.json --ranks",
        "HOROVOD_PARTIAL_NO_SUCH_SETTING=1 make test",
        "tools/gpu_check.sh run --no-such-option",
        "no-such-program",
        "mpirun -np 4 python no_such_file.py",
        "mpirun -np 1 python train.py : -np 3 horovod-partial run --no-such-option train.py",
        "kubectl apply -f no_such_file.yaml",
    ],
)
def test_a_wrong_command_is_noticed(command: str) -> None:
    with pytest.raises((AssertionError, SystemExit, subprocess.CalledProcessError, TyperException)):
        commands.check(command.split())


def check_python(text: str) -> None:
    compile(text, "block", "exec")


def check_shell(text: str) -> None:
    for command in commands.commands(text):
        commands.check(command)


def check_script(text: str) -> None:
    subprocess.run(["bash", "-n"], input=text, text=True, timeout=60, check=True)


CHECKS = {"python": check_python, "sh": check_shell, "bash": check_script, "json": json.loads}


@cases([block for block in BLOCKS if block.rule == "check" or block.language == "sh"])
def test_check(block: Block) -> None:
    CHECKS[block.language](block.text)


@front_end
@python("torch")
def test_torch(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: Block) -> None:
    run(block, tmp_path, monkeypatch)


@keras_front_end
@pytest.mark.usefixtures("policy_of_keras")
@python("tensorflow")
def test_tensorflow(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: Block) -> None:
    run(block, tmp_path, monkeypatch)


@keras_on_torch
@python("keras_on_torch")
def test_keras_on_torch(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: Block) -> None:
    run(block, tmp_path, monkeypatch)


@pytest.mark.timeout(300)  # several jobs, one after the other
@cases(
    [
        pytest.param(block, marks=() if block.file in SHELL_IN_EVERY_RUN else pytest.mark.full_matrix)
        for block in BLOCKS
        if (block.rule, block.language) == ("run", "sh")
    ]
)
def test_shell(block: Block, tmp_path: Path) -> None:
    if reason := Setup("mpi", 4).unavailable:
        pytest.skip(reason)
    prepare(tmp_path)
    if block.preamble:
        (tmp_path / "train.py").write_text(block.preamble.read_text())
    programs = tmp_path / "bin"
    programs.mkdir()
    horovodrun = programs / "horovodrun"
    horovodrun.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(launch.__file__).with_name("horovodrun.py")} "$@"\n')
    horovodrun.chmod(0o755)
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["timeout", "280", "bash", "-e", "-c", block.text],
        cwd=tmp_path,
        env=launch.environment(Setup("", 1), **launch.OPEN_MPI, PATH=path),
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
