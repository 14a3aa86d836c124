"""How long a step takes under the papers' baselines, at any number of ranks: who waits for whom, and for how long.

Each function takes `work`, the seconds of compute of each step with whatever delays it, of the shape (steps, ranks);
links; and the bytes of a model. It returns seconds of a step as `horovod_partial.insight.simulate` does: when a rank has ended
its last step, over their number, mean over the ranks. Models travel when a step is computed, and nothing overlaps
unless it says so. What a rank sends goes through its link one message after the other, and what it receives meanwhile
comes by the other direction; links between others are not in the way. Averaging itself takes no time. Policies of ours
are not here: they are simulated with the code that decides in a job.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from horovod_partial.insight.simulate import Cluster
from horovod_partial.merging import MessageCost

Floats = NDArray[np.float64]

# The papers' machine. They tell neither latency nor bandwidth; these are of MPI messages between two of its nodes, 1.3
# us and 9.6 GB/s, as its centre's own checks have them (reframe-hpc/reframe, cscs-checks/microbenchmarks/osu).
# Collectives, and models that come from a GPU, reached less there.
PIZ_DAINT = Cluster(latency=1.3e-6, seconds_per_byte=1 / 9.6e9)
# 16 GPUs on 10 Gbit/s Ethernet: what MG-WFBP's authors fitted to the allreduce of their cluster 1.
ETHERNET = Cluster.fit_ring(MessageCost(9.72e-4, 1.97e-9), 16)
LINKS = {"Piz Daint": PIZ_DAINT, "10 Gbit/s": ETHERNET}
ALGORITHM = "recursive_halving_doubling"  # of allreduces


def local_sgd(work: Floats, links: Cluster, nbytes: float, period: int = 1) -> float:
    """Every `period` steps all ranks wait for the slowest, and average their models by an allreduce."""
    cost = links.cost(ALGORITHM, work.shape[1])
    average = cost.latency + cost.seconds_per_byte * nbytes
    ends = np.zeros(work.shape[1])
    for step, row in enumerate(work):
        ends += row
        if (step + 1) % period == 0:
            ends[:] = ends.max() + average
    return float(ends.mean()) / len(work)


def d_psgd(work: Floats, links: Cluster, nbytes: float, in_step: bool = False) -> float:
    """A rank averages the models with which it and both its neighbours on a ring begin a step, beside the compute.

    Args:
        in_step: nobody begins a step before all have ended the one before, as eager-SGD's and WAGMA-SGD's authors
            describe it. The algorithm itself makes a rank wait for its neighbours only, so that a delay travels by one
            rank a step.
    """
    exchange = 2 * _message(links, nbytes)
    ends = np.zeros(work.shape[1])
    for row in work:
        arrived = ends + exchange
        ends = np.max([ends + row, arrived, np.roll(arrived, 1), np.roll(arrived, -1)], axis=0)
        if in_step:
            ends[:] = ends.max()
    return float(ends.mean()) / len(work)


def push_sum(
    work: Floats, links: Cluster, nbytes: float, neighbours: int = 1, in_step: bool = False, overlap: bool = False
) -> float:
    """SGP: a rank sends its model 1, 2, 4, ... ranks ahead, `neighbours` of these in turn, and averages what it gets.

    Args:
        in_step: as in `d_psgd`.
        overlap: a rank goes on with what was sent to it in the step before, so messages have a step's time to travel.
    """
    ranks = work.shape[1]
    distances = 2 ** np.arange((ranks - 1).bit_length())
    exchange = neighbours * _message(links, nbytes)
    ends = np.zeros(ranks)
    sent = np.zeros(ranks)  # when each rank's messages of the last step have arrived
    for step, row in enumerate(work):
        done = ends + row
        before, sent = sent, np.maximum(done, sent) + exchange
        first = (step - overlap) * neighbours
        arrived = before if overlap else sent
        chosen = distances[np.arange(first, first + neighbours) % len(distances)]
        ends = np.max([done if overlap else sent, *(np.roll(arrived, distance) for distance in chosen)], axis=0)
        if in_step:
            ends[:] = ends.max()
    return float(ends.mean()) / len(work)


def ad_psgd(work: Floats, links: Cluster, nbytes: float) -> float:
    """Half of the ranks send their model to one of the other half, which averages it and its own, and sends that back.

    A thread does that beside the compute, and nobody waits; where the two messages take longer, they are the step.
    """
    return float(np.maximum(work, 2 * _message(links, nbytes)).sum(axis=0).mean()) / len(work)


def parameter_server(work: Floats, links: Cluster, nbytes: float) -> float:
    """A rank fetches the model from one server, computes, and sends its gradients there; nobody waits for another.

    The server's link carries one message at a time in either direction, in the order in which they were asked for.
    """
    steps, ranks = work.shape
    message = _message(links, nbytes)
    free = {"fetch": 0.0, "send": 0.0}  # when the server's link is, in either direction
    asked = [(0.0, rank, "fetch") for rank in range(ranks)]
    taken = np.zeros(ranks, dtype=int)
    ends = np.zeros(ranks)
    while asked:
        time, rank, what = heapq.heappop(asked)
        free[what] = max(free[what], time) + message
        if what == "fetch":
            heapq.heappush(asked, (free[what] + work[taken[rank], rank], rank, "send"))
            continue
        taken[rank] += 1
        ends[rank] = free[what]
        if taken[rank] < steps:
            heapq.heappush(asked, (free[what], rank, "fetch"))
    return float(ends.mean()) / steps


def _message(links: Cluster, nbytes: float) -> float:
    """Seconds that a message between two ranks takes."""
    return links.latency + links.seconds_per_byte * nbytes
