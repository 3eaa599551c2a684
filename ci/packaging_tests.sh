#!/usr/bin/env bash
# The installed wheel, a C++ install tree, the build tree, and the pages' examples.
#   ci/packaging_tests.sh [PYTEST ARGUMENT...]   what is quick
#   ci/packaging_tests.sh slow [PYTEST ARGUMENT...]   CUDA consumers with own kernels, deep_moe inside another project
# Takes the wheel of ci/wheel.sh and the build of ci/build_cpp.sh.
. "$(dirname "$0")/common.sh"
which="not slow"
if [ "${1:-}" = slow ]; then
  which=slow
  shift
fi
use_venv test pipeline release
if [ "$which" = slow ] && [ -z "${NVSHMEM_DIR:-}" ] && command -v nvcc >/dev/null; then
  major=$(nvcc --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p')
  NVSHMEM_DIR=$(PYTHON=python ci/nvshmem.sh "$major" "build/nvshmem-cu$major")
  export NVSHMEM_DIR
fi
export DEEP_MOE_BUILD_TREE=$REPO/build/default DEEP_MOE_INSTALL_TREE=$REPO/build/install
rm -rf "$DEEP_MOE_INSTALL_TREE"
cmake --install build/default --prefix "$DEEP_MOE_INSTALL_TREE" >/dev/null
python -m pytest tests/packaging -m "$which" "$@"
