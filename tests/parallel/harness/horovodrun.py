"""`horovodrun`, told what Horovod was built with: to find out it imports TensorFlow, twice, which takes seconds."""

import sys

from horovod.runner import launch

if __name__ == "__main__":
    launch.gloo_built = launch.mpi_built = lambda verbose=False: True
    sys.exit(launch.run_commandline())
