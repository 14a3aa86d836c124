"""The program of each rank: `python -m harness.rank`, started by `harness.launch`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.progress import CHANNEL, report_to
from harness.results import leave
from harness.waiting import wait_asleep


def main() -> None:
    """Run the function that was asked for, and leave its results on rank 0."""
    channel = Path(os.environ[CHANNEL])
    request = json.loads((channel / "request.json").read_text())
    hvd = _import(request["framework"], request["device"])
    if request["asleep"]:
        wait_asleep()
    process_sets = [hvd.ProcessSet(members) for members in request["process_sets"]]
    hvd.init(process_sets=process_sets)
    if hvd.rank() == 0:
        report_to(channel)
    arguments = request["arguments"] | ({"process_sets": process_sets} if process_sets else {})
    function = getattr(_load(Path(request["script"])), request["function"])
    outcome = function(**arguments)
    for result in outcome if inspect.isgenerator(outcome) else [outcome]:
        if hvd.rank() == 0:
            leave(channel, result)


def _import(framework: str, device: str) -> Any:
    """The framework, which is to use one thread and a device, and our front end for it."""
    if framework == "torch":
        import torch

        torch.set_num_threads(1)
        torch.set_default_device(device)
    else:
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
    return importlib.import_module(f"horovod_partial.{framework}")


def _load(script: Path) -> ModuleType:
    sys.path.insert(0, str(script.parent))
    specification = importlib.util.spec_from_file_location(script.stem, script)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[script.stem] = module
    specification.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
