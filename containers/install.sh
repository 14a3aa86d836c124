#!/bin/sh
# Install all that training takes on a bare Debian, as root: Python, a compiler, an MPI, the frameworks that are named, Horovod built
# for them, and horovod-partial. Dockerfile, Apptainer definition and `make matrix` call it.
#
#     containers/install.sh torch==2.13.0 tensorflow-cpu==2.21.0
#
# PIP_EXTRA_INDEX_URL is where pip looks, too, say for PyTorch's builds without CUDA.
set -eu
source=$(dirname "$0")/..
venv=/venv

export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends \
  python3-venv python3-dev g++ make openmpi-bin libopenmpi-dev openssh-client ca-certificates
rm -rf /var/lib/apt/lists/*

[ -x "$venv/bin/pip" ] || python3 -m venv "$venv"
export PATH="$venv/bin:$PATH" PIP_NO_CACHE_DIR=1
pip install --quiet "$@"
python "$source/tools/install_horovod.py"
pip install --quiet "$source"
cd / # Python would import the package of the source folder
horovod-partial check
