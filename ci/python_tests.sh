#!/usr/bin/env bash
# The Python tests, on the package that ci/wheel.sh installed: ci/python_tests.sh [PYTEST ARGUMENT...]
. "$(dirname "$0")/common.sh"
need_spin
use_venv test
python -m pytest --ignore=tests/packaging --durations=15 "$@"
