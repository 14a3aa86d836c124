"""The logger of horovod_partial: Python's messages and those of the hooks go the same way, with the rank in every line."""

from __future__ import annotations

import logging

from horovod_partial import _attach
from horovod_partial.settings import settings

logger = logging.getLogger("horovod_partial")


class _Handler(logging.Handler):
    """Hands records to the log of C++, so that lines of both sides look alike and do not mix."""

    rank = -1

    def emit(self, record: logging.LogRecord) -> None:
        _attach.log(record.levelno, self.rank, self.format(record))


_handler = _Handler()


def start() -> None:
    """Begin to log, in Python and in C++, at the level of the settings."""
    level = getattr(logging, settings().log_level.upper())
    logger.setLevel(level)
    _attach.set_log_level(level)
    if _handler not in logger.handlers:
        logger.addHandler(_handler)
        logger.propagate = False


def set_rank(rank: int) -> None:
    """The rank in Python's messages from now on; C++ knows it."""
    _handler.rank = rank
