"""The logger of horovod_partial: Python's messages and those of the C++ core go the same way, rank in every line."""

from __future__ import annotations

import logging

from horovod_partial import _core
from horovod_partial.settings import settings

logger = logging.getLogger("horovod_partial")


class _CoreHandler(logging.Handler):
    """Hands records to the C++ log, so that lines of both sides look alike and do not mix."""

    rank = -1

    def emit(self, record: logging.LogRecord) -> None:
        _core.log(record.levelno, self.rank, self.format(record))


_handler = _CoreHandler()


def start(rank: int) -> None:
    """Begin to log as `rank`, at the level of the settings."""
    _handler.rank = rank
    level = getattr(logging, settings().log_level.upper())
    logger.setLevel(level)
    _core.set_log_level(level)
    if _handler not in logger.handlers:
        logger.addHandler(_handler)
        logger.propagate = False
