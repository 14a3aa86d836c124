"""Where the programs of others come from: an archive of PyPI, or one commit of a repository, kept in the project's cache."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
from install_horovod import cache_dir

SECONDS = 300


class Archive(NamedTuple):
    """A source distribution on PyPI."""

    name: str
    version: str
    sha256: str


class Commit(NamedTuple):
    """A commit on GitHub, whose name is the hash of what it holds."""

    repository: str
    sha: str


def tree(source: Archive | Commit) -> Path:
    """The folder of a source, fetched now if the cache has none. Skips the test where it cannot be fetched."""
    name = source.repository.replace("/", "-") if isinstance(source, Commit) else source.name
    folder = cache_dir() / "clients" / f"{name}-{source[-1][:12]}"
    if folder.exists():
        return folder
    scratch = folder.with_suffix(".new")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        if isinstance(source, Commit):
            _fetch(source, scratch)
        else:
            _download(source, scratch)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"{' '.join(source[:2])} could not be fetched: {error}")
    return scratch.rename(folder)


def _run(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, timeout=SECONDS, stdin=subprocess.DEVNULL)


def _fetch(source: Commit, folder: Path) -> None:
    _run("git", "init", "--quiet", folder)
    address = f"https://github.com/{source.repository}"
    _run("git", "-C", folder, "fetch", "--quiet", "--depth=1", address, source.sha)
    _run("git", "-C", folder, "checkout", "--quiet", "FETCH_HEAD")


def _download(source: Archive, folder: Path) -> None:
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{source.name}=={source.version} --hash=sha256:{source.sha256}\n")
    options = ("--quiet", "--no-deps", "--no-binary=:all:", "--require-hashes", f"--dest={folder}")
    _run(sys.executable, "-m", "pip", "download", *options, "--requirement", wanted)
    archive = next(folder.glob("*.tar.gz"))
    shutil.unpack_archive(archive, folder, filter="data")
    archive.unlink()
    for file in next(folder.glob("*/")).iterdir():
        file.rename(folder / file.name)
