"""The logger of horovod_partial. Messages of Python and of C++ go to one log, with the rank in every line."""

from __future__ import annotations

import logging

from horovod_partial import _attach
from horovod_partial.settings import settings

logger = logging.getLogger("horovod_partial")


class _Handler(logging.Handler):
    """Hands Python's log records to the log of C++, so that the lines of both look alike and do not mix."""

    rank = -1

    def emit(self, record: logging.LogRecord) -> None:
        _attach.log(record.levelno, self.rank, self.format(record))


_handler = _Handler()


def start() -> None:
    """Begin to log, in Python and in C++, at the level that `HOROVOD_PARTIAL_LOG_LEVEL` sets."""
    level = getattr(logging, settings().log_level.upper())
    logger.setLevel(level)
    _attach.set_log_level(level)
    logger.addHandler(_handler)
    logger.propagate = False


def set_rank(rank: int) -> None:
    """Set the rank that log messages of Python show. Messages of C++ already have it."""
    _handler.rank = rank
