"""Options of buckets. A bucket is a message of several gradients that travel together under a partial policy."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from horovod.common.process_sets import ProcessSet
from horovod.common.util import split_list

from horovod_partial import _core
from horovod_partial.exchange.arguments import check_predivide, is_average
from horovod_partial.policies import Policy, SharedUpdates
from horovod_partial.runtime import bucket_config
from horovod_partial.runtime.runtime import Runtime
from horovod_partial.settings import settings


class BucketOptions:
    """The options of the buckets of a tape or of an optimizer, checked when this object is made.

    `arguments` are those of Horovod's optimizer: `compression`, `sparse_as_dense`, `op`, `gradient_predivide_factor`,
    `groups` and `process_set`. The argument `replays` says whether the caller can apply missed rounds one by one. The
    attribute `replays` says whether this is done. If `unscaled`, gradients travel without their loss scale, and late
    gradients travel even if they are not finite. `factor` multiplies each result. `agreed` are texts that describe
    further options, and must be equal on all ranks.

    Raises ValueError if an argument is wrong, or the process set is not registered.
    """

    def __init__(
        self,
        runtime: Runtime,
        sync: Policy | SharedUpdates,
        arguments: Mapping[str, Any],
        *,
        replays: bool,
        unscaled: bool = False,
        factor: float = 1.0,
        agreed: Sequence[str] = (),
    ) -> None:
        check_predivide(arguments)
        predivide, groups = arguments["gradient_predivide_factor"], arguments["groups"]
        grouped = [id(variable) for group in groups for variable in group] if isinstance(groups, list) else []
        if len(set(grouped)) < len(grouped):
            raise ValueError("A parameter can only appear once in groups.")
        missed = bucket_config.missed_by(sync, replays=replays)
        self.process_set: ProcessSet = arguments["process_set"]
        self.compression = arguments["compression"]
        self.sparse_as_dense = arguments["sparse_as_dense"]
        self.shares_work = isinstance(sync, SharedUpdates)
        self.unscaled = unscaled
        self.replays = missed == "replay"
        self.factor = factor
        self._runtime = runtime
        self._sync = sync
        self._groups = groups
        self._options = {
            "average": is_average(arguments["op"]),
            "prescale_factor": 1.0 / predivide,
            "postscale_factor": predivide * factor,
            "drop_nonfinite": not unscaled,
            "agreed": tuple(agreed),
            "missed": missed,
        }
        self.spec()

    def spec(self, members: Sequence[str] = (), **options: Any) -> _core.BucketSpec:
        """Return the declaration of a bucket. In round 0 ranks compare `members`, texts that name its gradients.

        `options` are arguments of `bucket_config.arguments`, and replace those of this object.
        """
        # Ask for the number of ranks each time, because an elastic job may change it.
        return bucket_config.arguments(
            sync=self._sync,
            size=self._runtime.size_of(self.process_set),
            members=members,
            **(self._options | options),
        )

    def plan(
        self,
        keys: Sequence[Hashable],
        kinds: Sequence[Hashable],
        sizes: Sequence[int],
        *,
        key_of: Callable[[Any], Hashable] = lambda variable: variable,
    ) -> list[list[int]]:
        """Plan which gradients travel together, without measurements. Returns the gradients' positions in each bucket.

        `keys`, `kinds` (such as dtypes) and `sizes` (in bytes) have an entry for each gradient, in the order of the
        model. `key_of` returns the key of a variable in one of the user's groups.
        """
        groups = positions_of(self._groups, keys, key_of)
        return pack(kinds, sizes, groups, settings().bucket_mb * 1e6)


def positions_of(
    groups: int | list[list[Any]] | None, keys: Sequence[Hashable], key_of: Callable[[Any], Hashable]
) -> list[list[int]]:
    """Convert the user's argument `groups` to a list of positions in `keys` for each group.

    `keys` and `key_of` are those of `BucketOptions.plan`. Variables that are not among `keys` are left out.
    """
    if groups and isinstance(groups, int):
        return split_list(list(range(len(keys))), groups)
    positions = {key: position for position, key in enumerate(keys)}
    return [[positions[key] for key in map(key_of, group) if key in positions] for group in groups or []]


def pack(
    kinds: Sequence[Hashable], sizes: Sequence[int], groups: Iterable[Iterable[int]], bucket_bytes: float
) -> list[list[int]]:
    """Pack gradients into buckets in reverse order of the model, because backward computes them in that order.

    `kinds` (such as dtypes) and `sizes` (in bytes) have the order of the model. All gradients of a bucket have one
    kind. `groups` are the positions that the user wants in one bucket; a group of several kinds becomes several
    buckets. The remaining gradients are packed by size: a bucket is closed once its size has reached `bucket_bytes`.
    Returns the positions of the gradients in each bucket.
    """
    remaining = list(range(len(kinds)))
    buckets: list[list[int]] = []
    for group in groups:
        wanted = set(group)
        for one in dict.fromkeys(kinds[i] for i in remaining if i in wanted):
            buckets.append([i for i in reversed(remaining) if i in wanted and kinds[i] == one])
        remaining = [i for i in remaining if i not in wanted]
    for one in dict.fromkeys(kinds[i] for i in remaining):
        bucket: list[int] = []
        size = 0
        for position in reversed([i for i in remaining if kinds[i] == one]):
            bucket.append(position)
            size += sizes[position]
            if size >= bucket_bytes:
                buckets.append(bucket)
                bucket, size = [], 0
        if bucket:
            buckets.append(bucket)
    return buckets
