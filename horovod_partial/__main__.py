"""`python -m horovod_partial`."""

from horovod_partial.cli import main

main()
