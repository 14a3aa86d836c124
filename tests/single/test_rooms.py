"""Who may import whom within the package: the arrows of docs/architecture.md."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import horovod_partial

PACKAGE = Path(horovod_partial.__file__).parent
FRONT_ENDS = {"torch", "tensorflow", "keras"}
PURE = {
    "policies",
    "settings",
    "checks",
    "documents",
    "runtime.bucket_config",
    "runtime.round_stats",
    "exchange.wp_sgd",
    "merging",
    "insight",
}
# For each room, the rooms that it must not import.
FORBIDDEN = {
    **{room: {"exchange", "runtime", "_attach", *FRONT_ENDS} for room in PURE},
    "launch": {"exchange", "runtime", "_attach", *FRONT_ENDS},
    "insight.recording": {"insight.report", "insight.advice"},
    "insight.report": {"insight.advice"},
    "runtime": {"exchange", *FRONT_ENDS},
    "exchange": FRONT_ENDS,
    "torch": {"tensorflow", "keras"},
    "tensorflow": {"torch"},
}
# The one way back: `hvd.DistributedOptimizer` of TensorFlow takes optimizers of Keras 3 too, and its elastic state models.
BACK = {("tensorflow/optimizer.py", "keras"), ("tensorflow/elastic.py", "keras")}


def sources_of(room: str) -> list[Path]:
    path = room.replace(".", "/")
    return [*PACKAGE.glob(f"{path}.py"), *(PACKAGE / path).glob("**/*.py")]


def imports(source: Path) -> Iterator[str]:
    """The modules of the package that a file imports, and the packages around them: `exchange.rounds` and `exchange`."""
    for node in ast.walk(ast.parse(source.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            ours = name.split(".")
            if ours[0] == "horovod_partial":
                yield from (".".join(ours[1:end]) for end in range(2, len(ours) + 1))


@pytest.mark.parametrize("room", FORBIDDEN)
def test_imports_go_one_way(room: str) -> None:
    assert sources_of(room)
    found = {(str(source.relative_to(PACKAGE)), name) for source in sources_of(room) for name in imports(source)}
    forbidden = FORBIDDEN[room] - {room}
    assert not {(source, name) for source, name in found - BACK if name in forbidden and not name.startswith(room)}


def test_what_is_pure_needs_no_horovod() -> None:
    for room in PURE:
        for source in sources_of(room):
            assert "from horovod." not in source.read_text(), source


ROOT = Path(__file__).parents[2]
# For each room of the core, the rooms that it may include besides itself.
CORE = {
    "values": set(),
    "groups": {"values"},
    "quorum": {"values", "groups"},
    "rounds": {"values", "groups", "quorum"},
    "merging": {"values"},
    "slowness": {"values"},
    "watch": {"values", "slowness"},
}


def test_rooms_of_the_core_include_one_way() -> None:
    rooms = [path for path in (ROOT / "cpp" / "core").iterdir() if path.is_dir()]
    assert {room.name for room in rooms} == set(CORE)
    for room in rooms:
        for source in room.iterdir():
            included = set(re.findall(r'#include "(\w+/\w+)/', source.read_text()))
            assert included <= {f"core/{name}" for name in {room.name, *CORE[room.name]}}, source


def test_the_tree_of_the_architecture_names_every_file() -> None:
    tree = (ROOT / "docs" / "architecture.md").read_text().partition("```text\n")[2].partition("```")[0]
    named = set(re.findall(r"[\w.]+", tree))
    modules = {path.name for path in PACKAGE.glob("**/*.py")} - {"__init__.py", "__main__.py", "_build_info.py"}
    sources = {path.stem for path in (ROOT / "cpp").glob("**/*") if path.suffix in (".h", ".cc")}
    assert not modules - named
    assert not sources - named


def test_only_the_engine_locks_buckets() -> None:
    sources = [path for path in (ROOT / "cpp").glob("*/*") if path.suffix in (".h", ".cc")]
    takers = {path.parent.name for path in sources if '"engine/shared_bucket.h"' in path.read_text()}
    assert takers == {"engine"}


def test_a_header_defines_no_state() -> None:
    """Two of our libraries include the same headers. A variable that a header defines would exist once in each of them."""
    variable = re.compile(r"^\s+static (?!constexpr)[^()\n]*=", re.MULTILINE)
    headers = list((ROOT / "cpp").glob("**/*.h"))
    assert headers
    assert {header.name: found for header in headers if (found := variable.findall(header.read_text()))} == {}
