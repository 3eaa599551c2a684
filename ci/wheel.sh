#!/usr/bin/env bash
# Builds the wheel into build/dist with warnings as errors, and installs it into the virtual environment.
. "$(dirname "$0")/common.sh"
use_venv test release
build_wheel build/dist DEEP_MOE_WERROR=ON
install_wheel build/dist
ls -l build/dist
python ci/check_wheel.py --local build/dist/*.whl
