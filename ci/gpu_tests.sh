#!/usr/bin/env bash
# Everything that needs a GPU, in one go or by part.
#   ci/gpu_tests.sh              all of them; some eight minutes on 16 cores
#   ci/gpu_tests.sh cpp          kernels, device memory, the GPU Buffer and its stress (build/cuda)
#   ci/gpu_tests.sh python [PYTEST ARGUMENT...]   tests/gpu on the installed wheel
#   ci/gpu_tests.sh timing       timings of kernels and of the Buffer
#   ci/gpu_tests.sh bench        deep-moe bench on all GPUs: build/gpu/bench.json, and its tables in build/gpu/bench.md
#   ci/gpu_tests.sh sanitize     the C++ tests, reduced, under compute-sanitizer: memcheck, racecheck, synccheck
# DEEP_MOE_GPU_STRESS_CALLS: calls of each stress, at most (all of them; 100 under compute-sanitizer).
# Ranks go round the GPUs that CUDA_VISIBLE_DEVICES leaves.
. "$(dirname "$0")/common.sh"
[ "$(num_gpus)" -gt 0 ] || die "nvidia-smi lists no GPU here"
part=${1:-all}
[ $# = 0 ] || shift
export DEEP_MOE_EXPECT_GPUS=${DEEP_MOE_EXPECT_GPUS:-1}
# Ranks that are threads: no code is loaded while a kernel waits, and no two streams share a hardware queue.
threads=(env CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=32)
tests=build/cuda/tests/cpp/gpu_tests

build() {
  command -v nvcc >/dev/null || die "nvcc is missing; install the CUDA toolkit or put it on PATH"
  need_doctest
  use_venv
  say "building for sm_$DEEP_MOE_CUDA_ARCHITECTURES"
  cmake --preset cuda -DDEEP_MOE_CUDA_ARCHITECTURES="$DEEP_MOE_CUDA_ARCHITECTURES" >/dev/null
  cmake --build --preset cuda --parallel "$JOBS" --target gpu_tests two_ranks_gpu
}
cpp() {
  build
  say "C++ tests"
  "${threads[@]}" "$tests" --test-case-exclude='timing*'
  say "C++ example"
  build/cuda/examples/two_ranks_gpu
}
installed=
install_once() {
  [ -z "$installed" ] || return 0
  use_venv test
  build_wheel build/dist DEEP_MOE_CUDA=ON
  install_wheel build/dist
  installed=1
}
python_tests() {
  install_once
  say "Python tests"
  python -m pytest --expect-tier gpus1 tests/gpu "$@"
}
bench() {
  install_once
  say "bench"
  mkdir -p build/gpu
  (cd build/gpu && deep-moe bench --routing uniform --num-sms 8,12,16,24 --fp8 --graph --overlap --host-cost --json bench.json)
  python -m deep_moe.cli.tables build/gpu/bench.json | tee build/gpu/bench.md
}
timing() {
  build
  say "timings"
  "${threads[@]}" "$tests" --test-case='timing*'
}
# Processes take turns there for minutes. In a shell of its own, for what it exports.
sanitize() (
  build
  export "${threads[@]:1}"
  under_sanitizers build/gpu "$tests" --test-case-exclude='timing*,*processes*,*process *'
)

case $part in
  all)
    cpp
    python_tests
    sanitize
    timing
    bench
    ;;
  cpp) cpp ;;
  python) python_tests "$@" ;;
  timing) timing ;;
  bench) bench ;;
  sanitize) sanitize ;;
  *) die "usage: ci/gpu_tests.sh [cpp|python|timing|bench|sanitize]" ;;
esac
