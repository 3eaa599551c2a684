#!/usr/bin/env bash
# Gives a wheel its manylinux tag: ci/repair_wheel.sh FOLDER WHEEL...; auditwheel is on PATH. The driver's library
# and NVSHMEM's are the user's and stay out.
set -euo pipefail
folder=${1:?usage: ci/repair_wheel.sh FOLDER WHEEL...}
shift
exec auditwheel repair --plat "manylinux_2_28_$(uname -m)" --only-plat --exclude libcuda.so.1 \
  --exclude 'libnvshmem_host.so*' -w "$folder" "$@"
