"""The manifest for Kubeflow's MPI operator, against the published definition of an MPIJob."""

import itertools
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

HERE = Path(__file__).resolve().parent
MANIFEST = HERE.parents[1] / "examples" / "kubernetes" / "mpijob.yaml"
SCHEMA = json.loads((HERE / "mpijob.schema.json").read_text())


@pytest.fixture
def manifest() -> dict[str, Any]:
    return yaml.safe_load(MANIFEST.read_text())


def test_the_manifest_is_an_mpijob(manifest: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(manifest, SCHEMA)


@pytest.mark.parametrize(
    ("path", "right", "wrong"),
    [
        ([], "spec", "specs"),
        (["spec"], "slotsPerWorker", "slotPerWorker"),
        (["spec"], "launcherCreationPolicy", "launcherPolicy"),
        (["spec"], "mpiReplicaSpecs", "replicaSpecs"),
        (["spec", "runPolicy"], "cleanPodPolicy", "cleanPodsPolicy"),
        (["spec", "mpiReplicaSpecs"], "Worker", "worker"),
        (["spec", "mpiReplicaSpecs", "Worker"], "replicas", "replica"),
        (["spec", "mpiReplicaSpecs", "Worker"], "restartPolicy", "restart"),
        (["spec", "mpiReplicaSpecs", "Launcher", "template", "spec"], "containers", "container"),
        (["spec", "mpiReplicaSpecs", "Launcher", "template", "spec", "containers", 0], "env", "environment"),
        (["spec", "mpiReplicaSpecs", "Launcher", "template", "spec", "containers", 0, "env", 0], "value", "val"),
        (["spec", "mpiReplicaSpecs", "Worker", "template", "spec", "containers", 0, "resources"], "limits", "limit"),
    ],
)
def test_a_misspelt_field_is_refused(manifest: dict[str, Any], path: list[str | int], right: str, wrong: str) -> None:
    part: Any = manifest
    for key in path:
        part = part[key]
    part[wrong] = part.pop(right)
    with pytest.raises(jsonschema.ValidationError, match=f"'{wrong}' was unexpected|'{right}' is a required"):
        jsonschema.validate(manifest, SCHEMA)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["spec", "slotsPerWorker"], "1"),
        (["spec", "runPolicy", "cleanPodPolicy"], "Never"),
        (["spec", "mpiReplicaSpecs", "Launcher", "replicas"], 2),
        (["spec", "mpiReplicaSpecs", "Worker", "restartPolicy"], "Sometimes"),
        (["spec", "mpiReplicaSpecs", "Launcher", "template", "spec", "containers", 0, "env", 1, "value"], 4),
        (["spec", "mpiReplicaSpecs", "Launcher", "template", "spec", "containers", 0, "args", 2], 4),
    ],
)
def test_a_wrong_value_is_refused(manifest: dict[str, Any], path: list[str | int], value: object) -> None:
    """Numbers where Kubernetes wants text are the usual mistake."""
    part: Any = manifest
    for key in path[:-1]:
        part = part[key]
    assert part[path[-1]] != value
    part[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(manifest, SCHEMA)


def test_every_variable_of_the_launcher_reaches_the_ranks(manifest: dict[str, Any]) -> None:
    """The launcher is no rank, and mpirun hands on only what it is told to."""
    replicas = manifest["spec"]["mpiReplicaSpecs"]
    (launcher,) = replicas["Launcher"]["template"]["spec"]["containers"]
    arguments = launcher["args"]
    handed_on = {name for option, name in itertools.pairwise(arguments) if option == "-x"}
    assert handed_on == {variable["name"] for variable in launcher["env"]}
    ranks = replicas["Worker"]["replicas"] * manifest["spec"]["slotsPerWorker"]
    assert arguments[arguments.index("-np") + 1] == str(ranks)
