#!/usr/bin/env bash
# The C++ example as README.md tells to build it: two ranks as two processes, no Python, no test framework.
. "$(dirname "$0")/common.sh"
need_compiler
use_venv
cmake --preset example >/dev/null
cmake --build --preset example --parallel "$JOBS"
./build/example/examples/two_ranks
