#!/usr/bin/env bash
# Everything that needs GPUs, in one go or by part. Ranks go round the GPUs that CUDA_VISIBLE_DEVICES leaves, one or more.
#   ci/gpu_tests.sh              all of them, with a summary; some eight minutes on 16 cores
#   ci/gpu_tests.sh cpp          kernels, device memory, the GPU Buffer and its stress (build/cuda)
#   ci/gpu_tests.sh python [PYTEST ARGUMENT...]   tests/gpu on the installed wheel; all of them in parts side by side
#   ci/gpu_tests.sh sanitize     the C++ tests, reduced, under compute-sanitizer: memcheck, racecheck, synccheck
#   ci/gpu_tests.sh timing       timings of kernels and of the Buffer: build/gpu/timing.txt, kernels.jsonl
#   ci/gpu_tests.sh bench        deep-moe bench: build/gpu/bench*.json, and their tables in bench.md
# DEEP_MOE_GPU_STRESS_CALLS: calls of each stress, at most (all of them; 100 under compute-sanitizer).
# DEEP_MOE_GPU_BUILT=1: what an earlier part has built and installed is taken as it is.
. "$(dirname "$0")/common.sh"
gpus=$(num_gpus)
[ "$gpus" -gt 0 ] || die "nvidia-smi lists no GPU that CUDA_VISIBLE_DEVICES leaves"
part=${1:-all}
[ $# = 0 ] || shift
export DEEP_MOE_EXPECT_GPUS=${DEEP_MOE_EXPECT_GPUS:-1}
# Ranks that are threads: no code is loaded while a kernel waits, and no two streams share a hardware queue.
threads=(env CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=32)
tests=build/cuda/tests/cpp/gpu_tests
parts_of_python=$((JOBS >= 12 ? 3 : 1))  # their ranks mostly wait for their processes to start
mkdir -p build/gpu

build() {
  [ -z "${DEEP_MOE_GPU_BUILT:-}" ] || return 0
  command -v nvcc >/dev/null || die "nvcc is missing; install the CUDA toolkit or put it on PATH"
  need_doctest
  use_venv
  say "building for sm_$DEEP_MOE_CUDA_ARCHITECTURES"
  cmake --preset cuda -DDEEP_MOE_CUDA_ARCHITECTURES="$DEEP_MOE_CUDA_ARCHITECTURES" >/dev/null
  cmake --build --preset cuda --parallel "$JOBS" --target gpu_tests two_ranks_gpu
}
install_built() {
  use_venv test
  [ -z "${DEEP_MOE_GPU_BUILT:-}" ] || return 0
  build_wheel build/dist DEEP_MOE_CUDA=ON
  install_wheel build/dist
}
cpp() {
  build
  say "C++ tests"
  "${threads[@]}" "$tests" --test-case-exclude='timing*'
  say "C++ example"
  build/cuda/examples/two_ranks_gpu
}
python_tests() {
  install_built
  say "Python tests"
  local tiers=gpus1 k pid pids=() failed=0
  [ "$gpus" = 1 ] || tiers+=,gpus2
  if [ $# -gt 0 ] || [ "$parts_of_python" = 1 ]; then
    python -m pytest --expect-tier "$tiers" tests/gpu "$@"
    return
  fi
  for ((k = 1; k <= parts_of_python; ++k)); do
    python -m pytest -q --expect-tier "$tiers" --shard "$k/$parts_of_python" tests/gpu >"build/gpu/python_$k.log" 2>&1 &
    pids+=($!)
  done
  for k in "${!pids[@]}"; do
    wait "${pids[$k]}" || failed=1
    grep -E '^(FAILED|ERROR)|(passed|failed|error).* in ' "build/gpu/python_$((k + 1)).log" || true
  done
  [ "$failed" = 0 ] || die "failed; see build/gpu/python_*.log"
}
# Processes take turns there for minutes. In a shell of its own, for what it exports.
sanitize() (
  build
  export "${threads[@]:1}"
  under_sanitizers build/gpu "$tests" --test-case-exclude='timing*,*processes*,*process *'
)
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
  local options=(--routing uniform --num-sms 8,12,16,24 --fp8 --graph "$@")
  (cd build/gpu && deep-moe bench "${options[@]}" --json "$name.json")
  { printf '\n`deep-moe bench %s`\n\n' "${options[*]}" && python -m deep_moe.cli.tables "build/gpu/$name.json"; } >>build/gpu/bench.md
}
bench() {
  install_built
  say "bench"
  rm -f build/gpu/bench*
  if [ "$gpus" = 1 ]; then
    one_bench bench --overlap --host-cost --expert-major
    one_bench bench_ll --mode ll --overlap
  else
    one_bench bench --mode both --overlap --host-cost --expert-major --compare nccl
    one_bench bench_8192 --tokens 8192
    one_bench bench_groups --groups 8 --topk-groups 4
  fi
  cat build/gpu/bench.md
}
# One after the other, for tests have deadlines and timings want the GPUs to themselves; what fails holds up no other.
all() {
  local each failed=()
  use_venv test
  (install_built) >build/gpu/wheel.log 2>&1 &  # beside the other build: neither keeps all cores busy to its end
  build
  wait $! || { cat build/gpu/wheel.log; die "the wheel was not built"; }
  export DEEP_MOE_GPU_BUILT=1
  for each in cpp python sanitize timing bench; do
    local start=$SECONDS
    "$BASH" ci/gpu_tests.sh "$each" || failed+=("$each")
    say "$each: $((SECONDS - start)) s"
  done
  [ ${#failed[@]} = 0 ] || die "failed: ${failed[*]}"
}

case $part in
  all) all ;;
  cpp) cpp ;;
  python) python_tests "$@" ;;
  sanitize) sanitize ;;
  timing) timing ;;
  bench) bench ;;
  *) die "usage: ci/gpu_tests.sh [cpp|python|sanitize|timing|bench]" ;;
esac
