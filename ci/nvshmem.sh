#!/usr/bin/env bash
# NVSHMEM to compile the network plug-in against: ci/nvshmem.sh 12|13 FOLDER puts that CUDA's package there unless it is
# there already, and prints the folder that has include/ and lib/.
set -euo pipefail
major=${1:?usage: ci/nvshmem.sh 12|13 FOLDER}
folder=$(realpath -m "${2:?usage: ci/nvshmem.sh 12|13 FOLDER}")
python=${PYTHON:-python3}
requirement=$(cd "$(dirname "$0")" && "$python" -c 'import sys, set_variant
print(set_variant.NVSHMEM.format(variant="cu" + sys.argv[1]))' "$major")
found=$folder/nvidia/nvshmem
[ -e "$found/include/nvshmem.h" ] ||
  "$python" -m pip install -q --disable-pip-version-check --no-deps --target "$folder" "$requirement" >&2
echo "$found"
