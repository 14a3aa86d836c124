"""Healing: replicas are compared after each flush, and those that differ get the values of one rank.

After a flush, ranks exchange hashes of their replicas, and values if hashes differ. Both travel in rounds of two
buckets, because rounds leave out ranks that have ended or joined. All ranks get the same hashes, so all decide alike.
"""

from __future__ import annotations

import hashlib
import pickle
import threading
import zlib
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from horovod.common.process_sets import ProcessSet

from horovod_partial import _attach, log
from horovod_partial.policies import Quorum
from horovod_partial.runtime import bucket_config
from horovod_partial.settings import settings

if TYPE_CHECKING:
    from horovod_partial.runtime.runtime import Runtime

# A family is the buckets of one optimizer. Ranks compare the replicas of at most this many families in one round.
_FAMILIES = 32
_WORDS = 8  # the number of 32-bit words by which a rank describes one family and its replica to other ranks
_CHUNK = 1 << 18  # the number of 32-bit words of a replica that travel in one round, when replicas are made equal
_LENGTH = 8  # the number of bytes that are sent before a replica's data, and tell the data's length

# Names of two buckets, by which ranks compare replicas. Both must begin with kOfFlushes of cpp/core/rounds/message.h.
FACTS, VALUES = (f"{bucket_config.INTERNAL}replicas.{what}" for what in ("facts", "values"))

Array = npt.NDArray[Any]
Key = tuple[str, Any, str]  # the key of a value in a replica: kind ("parameter", "state", ...), owner and name


class Replica(Protocol):
    """The values that should be equal on all ranks of a process set: a rank's model, and the state of its optimizer."""

    def arrays(self) -> dict[Key, Array]:
        """Return the parameters and the optimizer's tensors, each as bytes: uint8, of the shape (bytes,)."""

    def numbers(self) -> dict[Key, Any]:
        """Return learning rates and other plain values. All can be pickled, and equal values have an equal `repr`."""

    def is_finite(self) -> bool:
        """Whether all elements of all parameters are finite."""

    def write(self, arrays: Mapping[Key, Array], numbers: Mapping[Key, Any]) -> dict[Key, float]:
        """Overwrite this replica with these values. Returns, for each array that differed, the largest difference."""


class Facts(NamedTuple):
    """What a rank tells the other ranks about one family (the buckets of one optimizer) and its replica."""

    name: int  # stands for the family: a hash of the name of the family's first bucket
    rounds: int
    lost: int
    values: int  # hash of the replica's tensors
    numbers: int  # hash of the replica's plain values, such as learning rates
    joined: int  # 1 if the rank has lost rounds in the join that this flush ends, else 0


def digest(arrays: Mapping[Key, Array]) -> int:
    """Return a 32-bit hash of a replica's tensors. It depends on each bit, and on its place."""
    # CRC-32 reads several gigabytes a second, and sees each flip of two bits, and each swap of two short elements.
    return _hash(
        "".join(f"{key} {arrays[key].size} {zlib.crc32(arrays[key].data)};" for key in sorted(arrays, key=str))
    )


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little", signed=True)


def _facts_of(family: _attach.Family, replica: Replica, joined: Container[str]) -> Facts:
    """Return what this rank tells the other ranks about a replica: hashes of its values, and counts of its rounds."""
    first, numbers = family.names[0], _hash(repr(replica.numbers()))
    return Facts(_hash(first), family.taken, family.lost, digest(replica.arrays()), numbers, int(first in joined))


def parted(by_rank: Mapping[int, Sequence[Facts]]) -> dict[int, dict[int, Facts]]:
    """Find the families whose replicas differ between ranks that have taken equally many rounds.

    The result has for each such family, by the hash of its name, the facts of these ranks, by rank.
    """
    groups: dict[tuple[int, int], dict[int, Facts]] = {}
    for rank, facts in sorted(by_rank.items()):
        for each in facts:
            groups.setdefault((each.name, each.rounds), {})[rank] = each
    differ = [members for members in groups.values() if len({(m.values, m.numbers) for m in members.values()}) > 1]
    return {next(iter(members.values())).name: members for members in differ}


def source_of(members: Mapping[int, Facts], finite: Mapping[int, bool]) -> int:
    """Return the rank whose values all ranks get when their replicas differ.

    Candidates are the ranks whose parameters are all finite, or all ranks if there is no such rank. The ranks that lost
    the fewest rounds come first, then the largest set of ranks with equal values, then the lowest rank. If only plain
    values such as learning rates differ, the lowest rank is taken.
    """
    if len({facts.values for facts in members.values()}) == 1:
        return min(members)
    candidates = [rank for rank in members if finite[rank]] or list(members)
    fewest = min(members[rank].lost for rank in candidates)
    candidates = [rank for rank in candidates if members[rank].lost == fewest]
    sizes = Counter((members[rank].values, members[rank].numbers) for rank in candidates)
    return min(candidates, key=lambda rank: (-sizes[members[rank].values, members[rank].numbers], rank))


class _TooLateError(Exception):
    """A round in which ranks compare their replicas has closed without this rank."""


class Posted(NamedTuple):
    """A sum over the ranks that has begun. `values` has this rank's contribution, and later the result."""

    handle: _attach.Handle
    values: Array


# Sums over ranks that have not ended. The list keeps their arrays alive if a wait fails. Guarded by _in_flight_lock.
_in_flight: list[Posted] = []
_in_flight_lock = threading.Lock()


class Meeting:
    """The exchange of messages in which the ranks of a process set compare their replicas.

    Only the thread that flushes compares replicas. The messages travel in two buckets, FACTS and VALUES, which exist as
    long as the process set.
    """

    def __init__(self, runtime: Runtime, process_set: ProcessSet) -> None:
        self.rank, self.size = process_set.rank(), runtime.size_of(process_set)
        self.family = partial(runtime.family, process_set)
        self._submit = partial(runtime.submit, process_set.process_set_id)
        # Begin round 0 of both buckets, to declare them before any rank can end. This does not block.
        for name, size in ((FACTS, self.size * _FAMILIES * _WORDS), (VALUES, _CHUNK)):
            self.post(name, np.zeros(size, np.int32))

    def come(self) -> None:
        """Tell the core that the calling thread, which is about to flush, will arrive at FACTS and VALUES."""
        self.family([FACTS, VALUES]).claim()

    @property
    def has_begun(self) -> bool:
        """Whether round 0 of FACTS has ended, so that all ranks have begun this meeting."""
        return self.family([FACTS]).taken > 0

    def post(self, name: str, values: Array) -> Posted:
        """Begin to sum integers over the ranks of the process set, in place, in the bucket `name`.

        `values` has the dtype int32 and one dimension.
        """
        sync = Quorum(1.0, grace_ms=0)
        spec = bucket_config.arguments(sync=sync, size=self.size, average=False, missed="latest", late="discard")
        config = _attach.BucketConfig(spec, dtype=bucket_config.DTYPES["int32"], shape=[values.size], device=-1)
        address = values.ctypes.data
        posted = Posted(self._submit(name, config, address, address, 0, 0), values)
        with _in_flight_lock:
            _in_flight[:] = [other for other in _in_flight if not other.handle.poll()] + [posted]
        return posted

    def result(self, posted: Posted) -> tuple[Array, list[int]]:
        """Wait for a sum that `post` has begun. Returns the sum, and the ranks that have contributed to it.

        Raises _TooLateError if the round closed without this rank.
        """
        handle, values = posted
        handle.wait(())  # takes no rounds meanwhile, because rounds would change the replicas
        info = handle.info()
        if info.late:
            raise _TooLateError
        return values, list(info.members)

    def tell(self, rows: Sequence[Sequence[int]]) -> dict[int, list[list[int]]]:
        """Send rows of integers to all ranks. Returns the rows of every rank, by rank."""
        everything: dict[int, list[list[int]]] = {}
        begin, may_have_more = 0, True
        while may_have_more:
            mine = np.zeros((self.size, _FAMILIES, _WORDS), np.int32)
            for index, row in enumerate(rows[begin : begin + _FAMILIES]):
                mine[self.rank, index, : len(row) + 1] = [1, *row]
            told, members = self.result(self.post(FACTS, mine.reshape(-1)))
            table = told.reshape(mine.shape)
            for rank in members:
                everything.setdefault(rank, []).extend(row[1:].tolist() for row in table[rank] if row[0] == 1)
            may_have_more = any(table[rank, -1, 0] for rank in members)
            begin += _FAMILIES
        return everything

    def send(self, data: bytes | None, source: int) -> bytes | None:
        """Send the bytes of rank `source` to all ranks. Returns the bytes, or None if `source` did not take part."""
        framed = None if data is None else len(data).to_bytes(_LENGTH, "little") + data
        received = bytearray()
        size = _LENGTH  # how many bytes to receive; the first round tells how long the data is
        while len(received) < size:
            chunk = np.zeros(_CHUNK, np.int32)
            if framed is not None:
                part = framed[len(received) : len(received) + chunk.nbytes]
                chunk.view(np.uint8)[: len(part)] = np.frombuffer(part, np.uint8)
            values, members = self.result(self.post(VALUES, chunk))
            if source not in members:
                return None
            received += values.tobytes()
            size = _LENGTH + int.from_bytes(received[:_LENGTH], "little")
        return bytes(received[_LENGTH:size])


class Introduction:
    """Compares, by hashes in the bucket `name`, the parameters with which ranks begin to train. Some may have none."""

    def __init__(self, meeting: Meeting, name: str, parameters: Mapping[Key, Array]) -> None:
        mine = np.zeros(meeting.size, np.int32)
        mine[meeting.rank] = digest(parameters) if parameters else 0
        self._meeting = meeting
        self._start: Posted | None = meeting.post(name, mine)

    def tell(self, *, claims: bool) -> bool:
        """Log a warning if the ranks began with different models. Returns False before all hashes are there.

        It never waits, because a rank that had joined may begin much later than the others. With `claims` the calling
        thread is to arrive at the meeting's buckets, even if a gradient hook has begun the meeting in another thread.
        """
        if self._start is None:
            return True
        if not self._start.handle.poll():
            return False
        start, self._start = self._start, None
        if claims:
            self._meeting.come()
        try:
            digests, members = self._meeting.result(start)
        except _TooLateError:
            return True
        members = [rank for rank in members if digests[rank] != 0]
        differ = [rank for rank in members if digests[rank] != digests[members[0]]]
        if differ and self._meeting.rank == members[0]:
            log.logger.warning(
                "ranks begin with different models: the parameters of rank(s) %s are not those of rank %d. Call "
                "hvd.broadcast_parameters and its kin before the first step, or hvd.broadcast_variables in Keras",
                _listed(differ),
                members[0],
            )
        return True


def compare(
    meeting: Meeting, replicas: Sequence[tuple[_attach.Family, Replica]], joined: Container[str] = frozenset()
) -> None:
    """Compare the replicas of all ranks after a flush. If replicas differ, give all ranks the values of one rank.

    A rank loses rounds in a join, so its replicas may differ then. `joined` names the optimizers, each by its first
    bucket, that have lost rounds on this rank in the join that this flush ends. Their differences cause no message.
    Others are logged, or all ranks that compared the replica raise RuntimeError, under `HOROVOD_PARTIAL_HEAL=raise`.
    """
    try:
        _compare(meeting, replicas, joined)
    except _TooLateError:
        log.logger.info("this rank came too late to compare its replicas with those of other ranks")


def _compare(meeting: Meeting, replicas: Sequence[tuple[_attach.Family, Replica]], joined: Container[str]) -> None:
    for bucket in (FACTS, VALUES):  # forget missed rounds, which would make this rank late for the next round
        meeting.family([bucket]).clear()
    in_order = sorted(replicas, key=lambda pair: pair[0].names[0])
    mine = [(_facts_of(family, replica, joined), family, replica) for family, replica in in_order]
    rows_of = meeting.tell([facts for facts, _, _ in mine])
    told = {rank: [Facts(*row[: len(Facts._fields)]) for row in rows] for rank, rows in rows_of.items()}
    counts = Counter((each.name, each.rounds, each.values, each.numbers) for facts in told.values() for each in facts)
    for each, family, _ in mine:
        if counts[each.name, each.rounds, each.values, each.numbers] == meeting.size:  # equal on all ranks
            family.count_anew()
    differing = parted(told)
    if not differing:
        return
    own = {f.name: (of, replica) for f, of, replica in mine if differing.get(f.name, {}).get(meeting.rank) == f}
    rows = [[name, replica.is_finite()] for name, (_, replica) in own.items()]
    finite = {(rank, row[0]): bool(row[1]) for rank, rows in meeting.tell(rows).items() for row in rows}
    found = []
    for name, facts in sorted(differing.items()):
        members = {rank: of_rank for rank, of_rank in facts.items() if (rank, name) in finite}
        if len(members) < 2:  # skip a replica that fewer than 2 ranks still compare: flushes of other ranks failed
            continue
        source = source_of(members, {rank: finite[rank, name] for rank in members})
        data = None
        if source == meeting.rank:
            replica = own[name][1]
            data = pickle.dumps((replica.arrays(), replica.numbers()), protocol=5)
        sent = meeting.send(data, source)
        if sent is not None and meeting.rank in members:
            family, replica = own[name]
            arrays, numbers = pickle.loads(sent)
            apart = replica.write(arrays, numbers)
            family.count_anew()
            family.count_healed()
            found.append(_Finding(family, name, source, members, apart, list(arrays)))
    seen = meeting.tell([finding.row for finding in found])
    unexpected = [finding for finding in found if not finding.is_of_join]
    texts = [
        _describe(f, {rank: row for rank, rows in seen.items() for row in rows if row[0] == f.name}) for f in unexpected
    ]
    if texts and settings().heal == "raise":
        raise RuntimeError("\n".join(texts))
    for finding, text in zip(unexpected, texts, strict=True):
        if meeting.rank == min(finding.members):
            log.logger.warning("%s", text)


class _Finding(NamedTuple):
    family: _attach.Family
    name: int
    source: int
    members: dict[int, Facts]
    apart: dict[Key, float]  # for each array that differed: the largest difference from that of rank `source`
    keys: list[Key]  # the keys of all tensors of the replica

    @property
    def is_of_join(self) -> bool:
        """Whether all ranks that differed from rank `source` have lost rounds in the join that this flush ends."""
        of_source = self.members[self.source]
        others = [m for m in self.members.values() if (m.values, m.numbers) != (of_source.values, of_source.numbers)]
        return all(facts.joined for facts in others)

    @property
    def row(self) -> list[int]:
        """What this rank tells the others: the hash of the family's name, how many arrays differed, and two numbers.

        These are the index of the first differing array in `keys`, and the largest difference, as bits of a float32.
        """
        first = next((index for index, key in enumerate(self.keys) if key in self.apart), 0)
        bits = np.float32(max(self.apart.values(), default=0.0)).view(np.int32)
        return [self.name, len(self.apart), first, int(bits)]


def _describe(finding: _Finding, seen: Mapping[int, Sequence[int]]) -> str:
    """Return the message about replicas that differed: in what, by how much, and the likely reason.

    `seen` has the `row` of each rank.
    """
    members, source = finding.members, finding.source
    apart = {rank: row for rank, row in seen.items() if row[1] > 0}
    lost = {rank: facts.lost for rank, facts in members.items() if facts.lost}
    if apart:
        first = min(apart)
        most = max(float(np.int32(row[3]).view(np.float32)) for row in apart.values())
        what = (
            f"rank(s) {_listed(apart)} differed from rank {source} in up to {max(row[1] for row in apart.values())} of "
            f"{len(finding.keys)} tensors, by up to {most:.3g}; the first one of "
            f"rank {first} was {' '.join(map(str, finding.keys[apart[first][2]])).strip()}"
        )
    else:
        what = f"the learning rates, or other numbers, of rank {source} were not those of all ranks"
    if lost:
        why = (
            f"rank(s) {_listed(lost)} could not apply {max(lost.values())} round(s) one by one, because they were blocked, or had "
            "joined, or their parameters were written meanwhile"
        )
    elif apart:
        why = (
            "parameters, gradients or learning rates were changed on some ranks between two rounds (max_grad_norm=, "
            "register_round_hook and follow_rounds do it alike on all), or the ranks began with different models "
            "(hvd.broadcast_parameters)"
        )
    else:
        why = "let a schedule follow rounds (hvd.follow_rounds), or set such numbers on every rank"
    return f"replicas of {finding.family.names[0]} had parted: {what}. Ranks have the values of rank {source} now. Likely: {why}"


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
