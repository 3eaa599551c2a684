#!/usr/bin/env bash
# Runs the C++ tests and examples of ci/build_cpp.sh. GPU tests run where there is a GPU.
. "$(dirname "$0")/common.sh"
use_venv
gpus=$(num_gpus)
if [ "$gpus" -lt "${DEEP_MOE_EXPECT_GPUS:-0}" ]; then
  die "DEEP_MOE_EXPECT_GPUS=${DEEP_MOE_EXPECT_GPUS}, but nvidia-smi lists $gpus"
fi
if [ "$gpus" -gt 0 ]; then
  ctest --preset default "$@"
else
  echo "no GPU here: tests labelled gpu are left out"
  ctest --preset default -LE gpu "$@"
fi
