"""Lets `python -m horovod_partial` run the command `horovod-partial`."""

from horovod_partial.cli import main

main()
