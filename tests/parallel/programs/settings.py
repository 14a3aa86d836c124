"""Notes what `init` makes of a variable that one rank alone has: `settings.py RANK VALUE`, of the policy."""

import os
import sys

from common import RANK, note

rank, value = sys.argv[1:]
if int(rank) == RANK:
    os.environ["HOROVOD_PARTIAL_SYNC"] = value

import horovod_partial.torch as hvd
from horovod_partial.settings import settings

try:
    hvd.init()
    note("settled", settings().sync)
except ValueError as error:
    note("refused", str(error))
hvd.shutdown()
