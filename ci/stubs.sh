#!/usr/bin/env bash
# python/deep_moe/_C.pyi is generated from the installed module. Fails if the committed file differs; --write renews it.
. "$(dirname "$0")/common.sh"
use_venv
stub=python/deep_moe/_C.pyi
fresh=$(mktemp)
trap 'rm -f "$fresh"' EXIT
# Away from the repository: its python/ folder has no module to import.
(cd / && python -m nanobind.stubgen -q -m deep_moe._C -o "$fresh")
if [ "${1:-}" = --write ]; then
  cp "$fresh" "$stub"
elif ! diff -u "$stub" "$fresh"; then
  die "$stub is out of date: ci/wheel.sh && ci/stubs.sh --write"
fi
