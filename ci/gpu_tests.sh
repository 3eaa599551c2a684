#!/usr/bin/env bash
# Everything that needs GPUs, in one go or by part. Ranks go round the GPUs that CUDA_VISIBLE_DEVICES leaves, one or more.
#   ci/gpu_tests.sh              all of them; some eight minutes on 16 cores
#   ci/gpu_tests.sh cpp          kernels, device memory, the GPU Buffer and its stress (build/cuda)
#   ci/gpu_tests.sh python [PYTEST ARGUMENT...]   tests/gpu on the installed wheel
#   ci/gpu_tests.sh timing       timings of kernels and of the Buffer: build/gpu/timing.txt, kernels.jsonl
#   ci/gpu_tests.sh bench        deep-moe bench: build/gpu/bench.json and, on several GPUs, bench_*.json; their tables in bench.md
#   ci/gpu_tests.sh sanitize     the C++ tests, reduced, under compute-sanitizer: memcheck, racecheck, synccheck
# DEEP_MOE_GPU_STRESS_CALLS: calls of each stress, at most (all of them; 100 under compute-sanitizer).
. "$(dirname "$0")/common.sh"
gpus=$(num_gpus)
[ "$gpus" -gt 0 ] || die "nvidia-smi lists no GPU that CUDA_VISIBLE_DEVICES leaves"
part=${1:-all}
[ $# = 0 ] || shift
export DEEP_MOE_EXPECT_GPUS=${DEEP_MOE_EXPECT_GPUS:-1}
# Ranks that are threads: no code is loaded while a kernel waits, and no two streams share a hardware queue.
threads=(env CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=32)
tests=build/cuda/tests/cpp/gpu_tests
mkdir -p build/gpu

built=
build() {
  [ -z "$built" ] || return 0
  command -v nvcc >/dev/null || die "nvcc is missing; install the CUDA toolkit or put it on PATH"
  need_doctest
  use_venv
  say "building for sm_$DEEP_MOE_CUDA_ARCHITECTURES"
  cmake --preset cuda -DDEEP_MOE_CUDA_ARCHITECTURES="$DEEP_MOE_CUDA_ARCHITECTURES" >/dev/null
  cmake --build --preset cuda --parallel "$JOBS" --target gpu_tests two_ranks_gpu
  built=1
}
installed=
install_once() {
  [ -z "$installed" ] || return 0
  use_venv test
  build_wheel build/dist DEEP_MOE_CUDA=ON
  install_wheel build/dist
  installed=1
}
cpp() {
  build
  say "C++ tests"
  "${threads[@]}" "$tests" --test-case-exclude='timing*'
  say "C++ example"
  build/cuda/examples/two_ranks_gpu
}
python_tests() {
  local tiers=gpus1
  [ "$gpus" = 1 ] || tiers+=,gpus2
  install_once
  say "Python tests"
  python -m pytest --expect-tier "$tiers" tests/gpu "$@"
}
timing() {
  build
  say "timings"
  rm -f build/gpu/kernels.jsonl
  DEEP_MOE_JSON=$PWD/build/gpu/kernels.jsonl "${threads[@]}" "$tests" --test-case='timing*' | tee build/gpu/timing.txt
}
# one_bench NAME OPTION...: a run, its JSON file and its tables.
one_bench() {
  local name=$1
  shift
  (cd build/gpu && deep-moe bench --routing uniform --num-sms 8,12,16,24 --fp8 --graph --json "$name.json" "$@")
  printf '\n## %s: %s\n\n' "$name" "$*" >>build/gpu/bench.md
  python -m deep_moe.cli.tables "build/gpu/$name.json" >>build/gpu/bench.md
}
bench() {
  install_once
  say "bench"
  rm -f build/gpu/bench*
  if [ "$gpus" = 1 ]; then
    one_bench bench --overlap --host-cost
  else
    one_bench bench --mode both --overlap --host-cost
    one_bench bench_8192 --tokens 8192
    one_bench bench_groups --groups 8 --topk-groups 4
  fi
  cat build/gpu/bench.md
}
# Processes take turns there for minutes. In a shell of its own, for what it exports.
sanitize() (
  build
  export "${threads[@]:1}"
  under_sanitizers build/gpu "$tests" --test-case-exclude='timing*,*processes*,*process *'
)
# Builds beside each other: neither keeps all cores busy to its end.
build_all() {
  use_venv test
  (install_once) >build/gpu/wheel.log 2>&1 &
  build
  wait $! || { cat build/gpu/wheel.log; die "the wheel"; }
  installed=1
}

case $part in
  all)
    build_all
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
