"""AD-PSGD (Lian et al., ICML 2018): pairs of ranks average their models, whatever step either is at."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import torch

import horovod_partial.torch as hvd
from baselines.baseline import Baseline
from baselines.pairs import PAUSE, Inbox, Outbox, ranks_of_sets, set_with

_GOES_ON, _HAS_ENDED = 1.0, 0.0  # the last element of a request


class ADPSGD(Baseline):
    """Waits for nobody's compute: an active rank waits for its partner's answer alone, which a thread gives at once.

    The ranks are bipartite, as the paper has it against deadlocks: even ranks are active, odd ones passive. In each step an
    active rank sends its model to a passive one, drawn at random. That one takes the mean of this model and its own, and
    sends it back. Models travel while gradients are computed; so a gradient may be applied to a model that has been averaged
    since (the paper's Algorithm 1: gradient, average, then the update). Ranks may take different numbers of steps.

    Passive ranks answer from the first step after a flush to the next flush, in which they go on until all active ranks have
    flushed too.

    Args:
        optimizer: as in `Baseline`.
        process_sets: those of `process_sets_of`, initialised.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, process_sets: Sequence[hvd.ProcessSet]) -> None:
        super().__init__(optimizer)
        rank = hvd.rank()
        self._is_active = _is_active(rank)
        self._model = self._read()
        self._lock = threading.Lock()  # guards the model, which step and answers change
        self._inboxes: dict[int, Inbox] = {}  # by partner: an active rank's for answers, a passive rank's for requests
        self._outboxes: dict[int, Outbox] = {}
        for partner in (other for other in range(hvd.size()) if _is_active(other) != self._is_active):
            process_set = set_with(partner, process_sets)
            message = torch.empty_like(self._model if self._is_active else self._request(_GOES_ON))
            self._inboxes[partner] = Inbox("ad_psgd", partner, message, process_set)
            self._outboxes[partner] = Outbox("ad_psgd", partner, process_set)
        self._steps = 0
        self._asked: int | None = None  # the partner whose answer is under way
        self._answering: threading.Thread | None = None
        self._trains = False  # since the last flush

    @staticmethod
    def process_sets_of(ranks: int) -> list[list[int]]:
        """The ranks of the process sets that this needs: for each rank one with each of the other kind."""
        active = filter(_is_active, range(ranks))
        return ranks_of_sets([(rank, other) for rank in active for other in range(1, ranks, 2)], ranks)

    def step(self) -> None:
        self._begin()
        change = self._change()
        self._take_answer()
        with self._lock:
            self._model += change
            self._write(self._model)
        if self._is_active:
            self._ask()
        self._steps += 1

    def flush(self) -> None:
        self._begin()
        self._take_answer()
        if self._is_active:
            for outbox in self._outboxes.values():
                outbox.send(self._request(_HAS_ENDED))
        elif self._answering is not None:
            self._answering.join()
        for outbox in self._outboxes.values():
            outbox.drain()
        self._trains = False
        self._write_mean(self._model)

    def _begin(self) -> None:
        if self._trains:
            return
        self._trains = True
        self._model = self._read()
        if not self._is_active:
            self._answering = threading.Thread(target=self._answer, name="ad_psgd", daemon=True)
            self._answering.start()

    # --- Active ranks

    def _ask(self) -> None:
        """Send the model to a partner, without waiting for the answer."""
        draw = np.random.default_rng((hvd.rank(), self._steps))
        self._asked = int(draw.choice(list(self._outboxes)))
        self._inboxes[self._asked].listen()
        self._outboxes[self._asked].send(self._request(_GOES_ON))

    def _take_answer(self) -> None:
        """Take what a partner has made of the model, which has not changed since."""
        if self._asked is not None:
            self._model.copy_(self._inboxes[self._asked].take())
            self._asked = None

    def _request(self, state: float) -> torch.Tensor:
        return torch.cat([self._model, self._model.new_tensor([state])])

    # --- Passive ranks

    def _answer(self) -> None:
        """Answer all requests, until every partner has ended."""
        going = set(self._inboxes)
        for inbox in self._inboxes.values():
            inbox.listen()
        while going:
            for partner in [one for one in going if self._inboxes[one].has_message()]:
                request = self._inboxes[partner].take()
                if request[-1] == _HAS_ENDED:
                    going.remove(partner)
                    continue
                with self._lock:
                    self._model += request[:-1]
                    self._model /= 2
                    answer = self._model.clone()
                self._outboxes[partner].send(answer)
                self._inboxes[partner].listen()
            time.sleep(PAUSE)


def _is_active(rank: int) -> bool:
    return rank % 2 == 0
