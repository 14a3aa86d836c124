"""Whether all ranks have the same model, bit for bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


def digest(data: Any) -> str:
    """A hash of anything with a buffer."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def check_equal(hashes: Mapping[str, str], gather: Callable[[bytes], Sequence[bytes]], ranks: Iterable[int]) -> None:
    """Compare every rank's tensors with those of the first; to be called on all of them.

    Args:
        hashes: of this rank's tensors, by name, in an order to report them in.
        gather: every rank's bytes, in the order of `ranks`.
        ranks: who takes part.

    Raises:
        AssertionError: they differ; on every rank, with the first tensor that does, and whose it is.
    """
    everybody = [json.loads(text) for text in gather(json.dumps(hashes).encode())]
    by_rank = dict(zip(ranks, everybody, strict=True))
    names = list(dict.fromkeys(name for of_rank in everybody for name in of_rank))
    first, reference = next(iter(by_rank.items()))
    others = {
        name: [str(rank) for rank, of_rank in by_rank.items() if of_rank.get(name) != reference.get(name)]
        for name in names
    }
    differing = [name for name in names if others[name]]
    if differing:
        raise AssertionError(
            f"replicas differ in {len(differing)} of {len(names)} tensors: {differing[0]} of rank(s) "
            f"{', '.join(others[differing[0]])} is not that of rank {first}. Let all ranks begin with the same model "
            "(hvd.broadcast_parameters and its kin), and call optimizer.flush() on every rank before"
        )
