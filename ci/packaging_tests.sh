#!/usr/bin/env bash
# The installed wheel, a C++ install tree, and the pages' examples: ci/packaging_tests.sh [PYTEST ARGUMENT...]
# Takes the wheel of ci/wheel.sh and the build of ci/build_cpp.sh.
. "$(dirname "$0")/common.sh"
use_venv test
export DEEP_MOE_INSTALL_TREE=$REPO/build/install
rm -rf "$DEEP_MOE_INSTALL_TREE"
cmake --install build/default --prefix "$DEEP_MOE_INSTALL_TREE" >/dev/null
python -m pytest tests/packaging "$@"
