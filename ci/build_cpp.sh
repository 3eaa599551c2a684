#!/usr/bin/env bash
# Builds library, C++ tests and examples: ci/build_cpp.sh [PRESET], default `default` (see CMakePresets.json).
. "$(dirname "$0")/common.sh"
preset=${1:-default}
need_doctest
use_venv
cmake --preset "$preset" ${DEEP_MOE_CUDA:+-DDEEP_MOE_CUDA=$DEEP_MOE_CUDA}
cmake --build --preset "$preset" --parallel "$JOBS"
