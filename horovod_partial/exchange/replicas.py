"""Checks that all ranks have the same model: the same values, bit for bit, or at least the same variables."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from horovod.common.process_sets import ProcessSet

from horovod_partial.runtime.healing import Key, Replica
from horovod_partial.runtime.runtime import Runtime


def check_equal(replica: Replica, runtime: Runtime, process_set: ProcessSet) -> None:
    """Compare every rank's model and optimizer with those of the first rank. All ranks must call this.

    Options of parameter groups are not compared. If tensors differ, every rank raises AssertionError, which names the
    first such tensor and the ranks where it differs.
    """
    values: dict[Key, Any] = {key: repr(of).encode() for key, of in replica.numbers().items() if key[0] != "group"}
    hashes = {
        " ".join(map(str, key)).strip(): hashlib.blake2b(data, digest_size=8).hexdigest()
        for key, data in (values | replica.arrays()).items()
    }
    by_rank, differing = _compared(hashes, "assert_replicas_equal", runtime, process_set)
    if differing:
        name, others = next(iter(differing.items()))
        count = len({name for of_rank in by_rank.values() for name in of_rank})
        raise AssertionError(
            f"replicas differ in {len(differing)} of {count} tensors: {name} of rank(s) {', '.join(map(str, others))} is not "
            f"that of rank {next(iter(by_rank))}. Let all ranks begin with the same model (hvd.broadcast_parameters and its "
            "kin), and call optimizer.flush() on every rank before"
        )


def prepare_broadcast(kinds: Sequence[str], runtime: Runtime, process_set: ProcessSet) -> None:
    """Flush, because late gradients belong to the old values, and compare dtypes and shapes of variables over the ranks.

    All ranks must call this before a broadcast. Without the comparison a rank with an additional variable would wait
    for the other ranks for ever. `kinds` has dtype and shape of each variable. If variables differ, every rank raises
    ValueError, which names the first such variable and the ranks where it differs.
    """
    runtime.flush(process_set.process_set_id, compares=False)
    by_number = {str(index): kind for index, kind in enumerate(kinds)}
    by_rank, differing = _compared(by_number, "broadcast_variables.kinds", runtime, process_set)
    if differing:
        index, others = next(iter(differing.items()))
        first, reference = next(iter(by_rank.items()))
        raise ValueError(
            f"ranks have different variables: number {index} is {reference.get(index, 'missing')} on rank {first}, and "
            f"{by_rank[others[0]].get(index, 'missing')} on rank(s) {', '.join(map(str, others))}. Build the same model on "
            "every rank, and its optimizer (optimizer.build(model.trainable_variables)), before variables are broadcast"
        )


def _compared(
    mine: Mapping[str, str], name: str, runtime: Runtime, process_set: ProcessSet
) -> tuple[dict[int, dict[str, str]], dict[str, list[int]]]:
    """Return each rank's values, by name; and for each name the ranks whose value differs from the first rank's."""
    ranks = range(runtime.size()) if process_set.ranks is None else process_set.ranks
    gathered = runtime.gather_bytes(json.dumps(mine).encode(), name, process_set)
    by_rank = dict(zip(ranks, map(json.loads, gathered), strict=True))
    reference = next(iter(by_rank.values()))
    names = dict.fromkeys(name for of_rank in by_rank.values() for name in of_rank)
    others = {
        name: [rank for rank, of_rank in by_rank.items() if of_rank.get(name) != reference.get(name)] for name in names
    }
    return by_rank, {name: ranks for name, ranks in others.items() if ranks}
