"""docs/from-horovod.md names every public name of Horovod's front ends, and says rightly what it is here."""

import json
import re
import subprocess
import sys

import pytest
from harness.documents import ROOT

FRONT_ENDS = ("torch", "tensorflow", "keras", "tensorflow.keras")
# What a module imports for itself is no name of Horovod's.
WHAT_IT_IS = """
import importlib, inspect, json, sys

def of(theirs, ours):
    for name, value in vars(theirs).items():
        if not name.startswith("_") and not (inspect.ismodule(value) and not value.__name__.startswith("horovod.")):
            if inspect.ismodule(value):
                importlib.import_module(f"{ours.__name__}.{name}")
            here = getattr(ours, name, None)
            yield name, "not there" if here is None else "same" if here is value else "more"

packages = "horovod", "horovod_partial"
modules = {name: [importlib.import_module(f"{package}.{name}") for package in packages] for name in sys.argv[1:]}
print(json.dumps({name: dict(of(*pair)) for name, pair in modules.items()}))
"""


@pytest.fixture(scope="module")
def names() -> dict[str, dict[str, str]]:
    """What each name is, by front end: asked in a process of its own, which has all of them."""
    command = [sys.executable, "-c", WHAT_IT_IS, *FRONT_ENDS]
    return json.loads(subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_the_table_has_each_name(names: dict[str, dict[str, str]], front_end: str) -> None:
    page = (ROOT / "docs" / "from-horovod.md").read_text()
    section = page.partition(f"\n## horovod.{front_end}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+?) \| (same|more|not there) \|", section, re.MULTILINE)
    told = [(name, what) for cell, what in rows for name in re.findall(r"`(\w+)`", cell)]
    assert len(told) == len(dict(told)), "a name stands there twice"
    assert dict(told) == names[front_end]
