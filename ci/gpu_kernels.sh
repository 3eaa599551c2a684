#!/usr/bin/env bash
# The CUDA kernels on a machine with a GPU: builds the kernels and their tests with nvcc and doctest alone (no CMake, no
# Python) and runs them.
#   ci/gpu_kernels.sh                tests, then timings
#   ci/gpu_kernels.sh sanitize       tests under compute-sanitizer: memcheck, racecheck, synccheck
# DEEP_MOE_JSON: file to which the timing of dispatch and combine adds a line of JSON a row.
# DEEP_MOE_DOCTEST_INCLUDE: folder with doctest/doctest.h, if the compiler does not find it by itself.
. "$(dirname "$0")/common.sh"
[ "$(num_gpus)" -gt 0 ] || die "nvidia-smi lists no GPU here"
command -v nvcc >/dev/null || die "nvcc is missing; install the CUDA toolkit or put it on PATH"
include=${DEEP_MOE_DOCTEST_INCLUDE:-}
[ -n "$include" ] || need_doctest

out=build/gpu_kernels
mkdir -p "$out"
arch=sm_${DEEP_MOE_CUDA_ARCHITECTURES%%-*}
flags=(-std=c++20 -O3 -lineinfo -arch="$arch" -Icpp -Icpp/include -Itests/cpp -Werror all-warnings -Xcompiler=-Wall,-Wextra,-Wshadow)
[ -z "$include" ] || flags+=(-isystem "$include")
say "building for $arch"
pids=()
for source in cpp/kernels/{intranode,internode,low_latency,bench}/*.cu \
  tests/cpp/gpu_{notify,dispatch,combine,internode,low_latency,direct,low_latency_logfmt,notify_timing,rows_timing,low_latency_timing}_test.cu \
  cpp/runtime/tensor.cc cpp/cpu/simd_generic.cc tests/cpp/main.cc; do
  nvcc "${flags[@]}" -c "$source" -o "$out/${source//\//_}.o" &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid"; done
nvcc -arch="$arch" -cudart static "$out"/*.o -o "$out/gpu_tests" -lpthread

export DEEP_MOE_EXPECT_GPUS=${DEEP_MOE_EXPECT_GPUS:-1}
case ${1:-} in
  '')
    "$out/gpu_tests" --test-case-exclude='timing*'
    "$out/gpu_tests" --test-case='timing*'
    ;;
  sanitize)
    under_sanitizers "$out" "$out/gpu_tests" --test-case-exclude='timing*'
    ;;
  *) die "usage: ci/gpu_kernels.sh [sanitize]" ;;
esac
