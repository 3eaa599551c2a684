#!/usr/bin/env bash
# In a manylinux image, before the wheels of DEEP_MOE_VARIANT are built: puts a CUDA toolkit where CMake looks for one,
# and NVSHMEM where ci/release_wheels.sh says that it is.
set -euo pipefail
cd "$(dirname "$0")/.."
toolkit=/usr/local/cuda nvshmem=/usr/local/nvshmem
PYTHON=${PYTHON:-/opt/python/cp312-cp312/bin/python}
export PYTHON
case ${DEEP_MOE_VARIANT:?cpu, cu12 or cu13} in
  cpu) exit 0 ;;
  cu12)
    # 12.8 is the first with sm_100; there is no compiler of CUDA 12 among NVIDIA's Python packages.
    case $(uname -m) in
      x86_64) platform=x86_64 ;;
      aarch64) platform=sbsa ;;
      *) echo "cibw_before_all.sh: no CUDA toolkit for $(uname -m)" >&2; exit 1 ;;
    esac
    curl -fsSL -o /etc/yum.repos.d/cuda.repo \
      "https://developer.download.nvidia.com/compute/cuda/repos/rhel8/$platform/cuda-rhel8.repo"
    dnf install -y -q cuda-minimal-build-12-9
    ln -sfn /usr/local/cuda-12.9 "$toolkit"
    ;;
  cu13) ci/cuda_toolkit.sh 13 "$toolkit" ;;
  *) echo "cibw_before_all.sh: DEEP_MOE_VARIANT is '$DEEP_MOE_VARIANT'; allowed: cpu, cu12, cu13" >&2; exit 1 ;;
esac
ci/nvshmem.sh "${DEEP_MOE_VARIANT#cu}" "$nvshmem"
"$toolkit/bin/nvcc" --version
