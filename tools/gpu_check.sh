#!/bin/sh
# From a bare machine with a GPU to results, part by part; gpu_check.py says how: `tools/gpu_check.sh --help`.
exec "${PYTHON:-python3}" "$(dirname "$0")/gpu_check.py" "$@"
