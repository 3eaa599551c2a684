#!/usr/bin/env bash
# A CUDA toolkit without an installer, enough to compile this project: ci/cuda_toolkit.sh 12|13 FOLDER
#   12   12.4: the compiler out of Debian 13's nvidia-cuda-toolkit, headers and static runtime out of NVIDIA's wheels
#   13   13.0: all out of NVIDIA's wheels
set -euo pipefail
major=${1:?usage: ci/cuda_toolkit.sh 12|13 FOLDER}
folder=$(realpath -m "${2:?usage: ci/cuda_toolkit.sh 12|13 FOLDER}")
. "$(dirname "$0")/debian_suite.sh"
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -rf "$folder"

# wheels FOLDER REQUIREMENT...: their files, as they would lie in site-packages.
wheels() {
  local target=$1
  shift
  "$python" -m pip install -q --disable-pip-version-check --no-deps --only-binary :all: --target "$target" "$@"
}

case $major in
  12)
    debian_unpack "$work/debian" trixie "main contrib non-free" nvidia-cuda-toolkit
    wheels "$work/wheels" nvidia-cuda-nvcc-cu12==12.4.131 nvidia-cuda-runtime-cu12==12.4.127
    wheels "$work/newer" nvidia-cuda-runtime-cu12==12.9.79 nvidia-cuda-cccl-cu12==12.9.27 # have what 12.4's lack
    compiler=$work/debian/usr/lib/nvidia-cuda-toolkit
    wheels=$work/wheels/nvidia newer=$work/newer/nvidia
    mkdir -p "$folder"/{bin,lib,include,nvvm/bin,nvvm/libdevice}
    ln -s lib "$folder/lib64"
    cp "$compiler/bin/nvcc" "$work"/debian/usr/bin/{cudafe++,fatbinary,ptxas,nvlink,bin2c} "$folder/bin/"
    cp -r "$compiler/bin/crt" "$folder/bin/"
    cp "$compiler/bin/cicc" "$folder/nvvm/bin/"
    cp "$compiler/libdevice/libdevice.10.bc" "$folder/nvvm/libdevice/"
    cp -r "$newer/cuda_cccl/include/." "$wheels/cuda_nvcc/include/." "$wheels/cuda_runtime/include/." "$folder/include/"
    # The static runtime of 12.9: every 12.x driver takes it, and wheels of 12.4 have none.
    cp "$newer"/cuda_runtime/lib/lib{cudart_static,culibos}.a "$folder/lib/"
    cp "$wheels"/cuda_runtime/lib/libcudart.so.12 "$folder/lib/"
    ln -s libcudart.so.12 "$folder/lib/libcudart.so"
    ar rc "$folder/lib/libcudadevrt.a" # empty: no kernel launches kernels
    cat >"$folder/bin/nvcc.profile" <<'EOF'
TOP = $(_HERE_)/..
CICC_PATH = $(TOP)/nvvm/bin
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH += $(CICC_PATH):$(_HERE_):
INCLUDES += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib"
CUDAFE_FLAGS +=
PTXAS_FLAGS +=
EOF
    ;;
  13)
    "$python" -m pip install -q --disable-pip-version-check --only-binary :all: --target "$work/wheels" \
      'cuda-toolkit[nvcc,cudart,cccl,crt,nvvm,culibos]==13.0.*'
    mkdir -p "$(dirname "$folder")"
    mv "$work/wheels/nvidia/cu13" "$folder"
    ln -s lib "$folder/lib64"
    [ -e "$folder/lib/libcudart.so" ] || ln -s libcudart.so.13 "$folder/lib/libcudart.so"
    chmod +x "$folder"/bin/* "$folder"/nvvm/bin/*
    ;;
  *)
    echo "cuda_toolkit.sh: there is 12 and 13, not '$major'" >&2
    exit 1
    ;;
esac
"$folder/bin/nvcc" --version
