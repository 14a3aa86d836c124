"""Every public name of the installed Horovod's front ends is here under ours, and takes the same arguments; and our own names."""

import importlib
import inspect
import json
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from interpreter import run_command

FRONT_ENDS = ("torch", "tensorflow", "keras")

# Where a call that Horovod takes means something else here, or fails, and why.
DELIBERATE = {
    # Horovod's two optimizers of Keras part behind op; further arguments are to be named.
    "tensorflow.keras.DistributedOptimizer": "num_groups, groups follow op, as in horovod.keras",
    "tensorflow.DistributedOptimizer": "arguments after use_locking are named",
    # Horovod's own state of TensorFlow 1 sessions.
    "tensorflow.elastic.TensorFlowState": "needs its variables, and has no session",
    "tensorflow.elastic.TensorFlowKerasState": "has no backend",
    # Horovod's two part behind that.
    "keras.callbacks.BestModelCheckpoint": "arguments after verbose are named",
    "tensorflow.keras.callbacks.BestModelCheckpoint": "arguments after verbose are named",
    # Wrapping again takes all arguments of DistributedOptimizer, by name.
    "keras.load_model": "arguments after custom_objects are named",
    "tensorflow.keras.load_model": "arguments after custom_objects are named",
}


def modules(front_end: str) -> Iterator[str]:
    """The names of Horovod's public modules of a front end, without `horovod`."""
    package = importlib.import_module(f"horovod.{front_end}")
    yield front_end
    for found in pkgutil.walk_packages(package.__path__, f"horovod.{front_end}."):
        if not found.name.rpartition(".")[2].startswith(("_", "mpi_lib")):
            yield found.name.removeprefix("horovod.")


def public(name: str) -> Iterator[str]:
    """What a module of Horovod defines, and what a front end as a whole offers."""
    origins = "horovod." if "." not in name else f"horovod.{name}"
    for member, value in vars(importlib.import_module(f"horovod.{name}")).items():
        is_module = inspect.ismodule(value)
        origin = value.__name__ if is_module else getattr(value, "__module__", None)
        if not member.startswith("_") and (origin or "").startswith(origins) and not (is_module and "." in name):
            yield member


def positions(function: object) -> tuple[list[str], bool]:
    """The arguments that need no name, and whether there may be any number of them."""
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    named = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return named, any(one.kind is one.VAR_POSITIONAL for one in parameters)


def differences(front_end: str) -> dict[str, str]:
    """What a program finds missing, or with other arguments, where it imports ours."""
    found = {}
    for name in modules(front_end):
        theirs = importlib.import_module(f"horovod.{name}")
        ours = importlib.import_module(f"horovod_partial.{name}")
        for member in public(name):
            path = f"{name}.{member}"
            if not hasattr(ours, member):
                found[path] = "missing"
                continue
            their, our = getattr(theirs, member), getattr(ours, member)
            if our is their or not callable(their):
                continue
            theirs_named, _ = positions(their)
            ours_named, any_number = positions(our)
            if any_number and ours_named == theirs_named[: len(ours_named)]:
                continue
            if ours_named[: len(theirs_named)] != theirs_named:
                found[path] = f"takes {ours_named}, Horovod's {theirs_named}"
    return found


def differences_everywhere() -> dict[str, str]:
    return {path: what for front_end in FRONT_ENDS for path, what in differences(front_end).items()}


def own_names() -> dict[str, list[str]]:
    """By front end, what it offers beside the names of Horovod's front ends."""
    ours = {front_end: importlib.import_module(f"horovod_partial.{front_end}").__all__ for front_end in FRONT_ENDS}
    theirs = {name for front_end in FRONT_ENDS for name in dir(importlib.import_module(f"horovod.{front_end}"))}
    return {front_end: sorted(set(names) - theirs) for front_end, names in ours.items()}


def listed_names() -> dict[str, list[str]]:
    """By front end, the names that `dir` lists though they are not public."""
    ours = {front_end: importlib.import_module(f"horovod_partial.{front_end}") for front_end in FRONT_ENDS}
    return {front_end: sorted(set(dir(module)) - set(module.__all__)) for front_end, module in ours.items()}


def everything() -> dict[str, Any]:
    """What the tests ask of the front ends. First what looks at one after the other: a module that another imports is a name, too."""
    return {"differences": differences_everywhere(), "own": own_names(), "listed": listed_names()}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What `everything` returns in a process of its own, which imports all front ends."""
    program = "import json, test_names; print(json.dumps(test_names.everything()))"
    done = run_command(sys.executable, "-c", program, seconds=110, cwd="tests/single")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_name_of_horovods_is_here(found: dict[str, Any]) -> None:
    differences = found["differences"]
    assert {name: what for name, what in differences.items() if name not in DELIBERATE} == {}
    assert set(DELIBERATE) == set(differences)


def test_own_names_are_few_and_in_the_reference_with_an_example(found: dict[str, Any]) -> None:
    reference = Path("docs/api.md").read_text()
    examples = "".join(re.findall(r"^```python\n(.*?)^```", reference, re.DOTALL | re.MULTILINE))
    for front_end, names in found["own"].items():
        assert len(names) <= 28, f"{front_end} has {len(names)} names of its own"
        for name in names:
            is_described = re.search(rf"^\.\. auto\w+:: {name}$", reference, re.MULTILINE)
            assert is_described, f"{front_end}.{name} is not described"
            assert re.search(rf"\bhvd\.{name}\b", examples), f"{front_end}.{name} has no example"


def test_users_are_shown_public_names_only(found: dict[str, Any]) -> None:
    assert all(names == [] for names in found["listed"].values())


def test_a_module_that_horovod_has_holds_our_functions() -> None:
    import horovod.torch as theirs
    from horovod.torch.elastic.sampler import ElasticSampler as Theirs
    from horovod_partial.torch.compression import Compression
    from horovod_partial.torch.elastic.sampler import ElasticSampler

    import horovod_partial.torch as hvd
    from horovod_partial.torch import mpi_ops

    assert (mpi_ops, mpi_ops.init, mpi_ops.allreduce) == (hvd.mpi_ops, hvd.init, theirs.allreduce)
    assert theirs.mpi_ops.init is not hvd.init
    assert (Compression, ElasticSampler) == (theirs.Compression, Theirs)
    with pytest.raises(ModuleNotFoundError, match=r"horovod_partial\.torch\.nothing"):
        importlib.import_module("horovod_partial.torch.nothing")
