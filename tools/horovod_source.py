"""Find Horovod's source tree, which holds the headers that an installed Horovod lacks.

The tree comes from the source archive on PyPI, checked by its hash and unpacked once into a cache outside the checkout,
or offline from HOROVOD_PARTIAL_HOROVOD_SOURCE, a path to that archive or to an unpacked tree.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

VERSION = "0.28.1"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
SOURCE_VARIABLE = "HOROVOD_PARTIAL_HOROVOD_SOURCE"
CACHE_VARIABLE = "HOROVOD_PARTIAL_CACHE"


class SetupError(Exception):
    """A reason why set-up or build cannot go on, in one sentence that says what to do."""


def cache_dir() -> Path:
    """The folder for what is worth keeping between checkouts."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "horovod-partial"
    return Path(os.environ.get(CACHE_VARIABLE) or default)


def source_tree() -> Path:
    """The root of an unpacked, unmodified Horovod source tree of exactly VERSION."""
    given = os.environ.get(SOURCE_VARIABLE)
    if given and Path(given).is_dir():
        return _checked_tree(Path(given))
    tree = cache_dir() / f"horovod-{VERSION}-{SHA256[:12]}"
    if not tree.is_dir():
        tree.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=tree.parent) as scratch:
            archive = _checked_archive(Path(given)) if given else _download(Path(scratch))
            shutil.unpack_archive(archive, scratch)
            try:  # a rename is atomic, so a tree in the cache is always whole
                (Path(scratch) / f"horovod-{VERSION}").rename(tree)
            except OSError:
                if not tree.is_dir():  # else another process was faster
                    raise
    return tree


def _checked_tree(tree: Path) -> Path:
    init = tree / "horovod" / "__init__.py"
    match = re.search(r"__version__ = '(.+)'", init.read_text()) if init.is_file() else None
    if not match or match[1] != VERSION:
        found = f"Horovod {match[1]}" if match else "no Horovod"
        raise SetupError(
            f"{SOURCE_VARIABLE}={tree} holds {found}; point it to the source archive of Horovod {VERSION}."
        )
    return tree.resolve()


def _checked_archive(archive: Path) -> Path:
    if not archive.is_file():
        raise SetupError(f"{SOURCE_VARIABLE}={archive} does not exist; point it to horovod-{VERSION}.tar.gz.")
    if hashlib.sha256(archive.read_bytes()).hexdigest() != SHA256:
        raise SetupError(f"{archive} is not PyPI's horovod-{VERSION}.tar.gz: its SHA-256 is not {SHA256}.")
    return archive


def _download(folder: Path) -> Path:
    requirement = folder / "horovod.txt"
    requirement.write_text(f"horovod=={VERSION} --hash=sha256:{SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:"]
    command += ["--no-build-isolation", "--require-hashes", f"--requirement={requirement}", f"--dest={folder}"]
    missing = [name for name in ("setuptools", "wheel") if not find_spec(name)]
    if missing:
        raise SetupError(
            f"Fetching Horovod's source needs {' and '.join(missing)}; run `pip install {' '.join(missing)}`."
        )
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode != 0:
        reason = (result.stderr.strip() or "no reason given").rpartition("\n")[2]
        raise SetupError(
            f"pip could not download the source of Horovod {VERSION}, whose headers the build needs ({reason}); "
            f"set {SOURCE_VARIABLE} to horovod-{VERSION}.tar.gz from PyPI, or to an unpacked copy."
        )
    return folder / f"horovod-{VERSION}.tar.gz"
