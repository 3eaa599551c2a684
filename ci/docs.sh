#!/usr/bin/env bash
# Runs the examples in README.md and docs/ and checks the links between pages, on the package that ci/wheel.sh installed.
. "$(dirname "$0")/common.sh"
use_venv test
python -m pytest tests/packaging/test_docs.py "$@"
