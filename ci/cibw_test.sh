#!/usr/bin/env bash
# The wheel that is installed in the Python on PATH: what it says of itself, the benchmark and the tests on the CPU.
#   DEEP_MOE_WHEEL_TESTS   quick: without the tests
set -euo pipefail
repository=$(realpath "$(dirname "$0")/..")
cd "$(mktemp -d)" # away from the sources
python - <<'P'
import deep_moe, deep_moe._C, os
info = deep_moe._C.build_info()
print(info)
wanted = os.environ.get("DEEP_MOE_VARIANT", info["variant"])
assert info["variant"] == wanted, f"this wheel is {info['variant']}, not {wanted}"
P
deep-moe doctor
deep-moe bench --device cpu --ranks 2
if [ "${DEEP_MOE_WHEEL_TESTS:-all}" = quick ]; then exit 0; fi
python -m pytest -q -c "$repository/pyproject.toml" --rootdir "$repository" "$repository/tests/cpu"
