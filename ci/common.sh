# Sourced by every script here: strict mode, the repository root as the working folder, and helpers.
#
# Environment that the scripts read:
#   PYTHON                        interpreter for the virtual environment (python3)
#   DEEP_MOE_VENV                 its folder (.venv)
#   DEEP_MOE_TORCH                what to install where the interpreter has no torch (torch==2.13.0)
#   DEEP_MOE_CUDA                 AUTO, ON or OFF, as for CMake (AUTO)
#   DEEP_MOE_CUDA_ARCHITECTURES   GPU architectures to compile for (here one: this machine's, or 90a)
#   DEEP_MOE_EXPECT_GPUS          number of GPUs without which a run is a failure (0)
#   JOBS                          compile jobs (number of cores)

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
REPO=$PWD
VENV=${DEEP_MOE_VENV:-$REPO/.venv}
JOBS=${JOBS:-$(nproc)}
export PIP_DISABLE_PIP_VERSION_CHECK=1
export CTEST_PARALLEL_LEVEL=${CTEST_PARALLEL_LEVEL:-$JOBS}

say() { printf '\n== %s\n' "$*"; }
die() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; exit 1; }

# Those that CUDA_VISIBLE_DEVICES leaves, where it is set.
num_gpus() {
  local here
  here=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
  [ "$here" = 0 ] || [ -z "${CUDA_VISIBLE_DEVICES+set}" ] || here=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c . || true)
  echo "$here"
}

# One architecture keeps a build short: the first GPU's, or 90a where there is none.
gpu_architecture() {
  local number
  number=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -dc 0-9) || true
  case $number in
    '') echo 90a ;;
    90 | 100) echo "${number}a" ;;
    *) echo "$number" ;;
  esac
}
export DEEP_MOE_CUDA_ARCHITECTURES=${DEEP_MOE_CUDA_ARCHITECTURES:-$(gpu_architecture)}

# need_packages WHAT PACKAGE...: something of the system's is missing; root gets it (in a pipeline, by sudo), others are
# told.
need_packages() {
  local what=$1 root=()
  shift
  if [ "$(id -u)" != 0 ] && [ -n "${CI:-}" ] && sudo -n true 2>/dev/null; then root=(sudo); fi
  if { [ "$(id -u)" = 0 ] || [ ${#root[@]} -gt 0 ]; } && command -v apt-get >/dev/null; then
    say "installing $* ($what is missing)"
    export DEBIAN_FRONTEND=noninteractive
    "${root[@]}" apt-get install -y -qq "$@" >/dev/null 2>&1 ||
      { "${root[@]}" apt-get update -qq && "${root[@]}" apt-get install -y -qq "$@" >/dev/null; }
  else
    die "$what is missing; as root: apt-get install $*"
  fi
}

need_compiler() {
  command -v c++ >/dev/null && command -v make >/dev/null || need_packages "a C++ compiler or make" g++ make
}

need_doctest() {
  need_compiler
  echo '#include <doctest/doctest.h>' | c++ -E -x c++ - >/dev/null 2>&1 || need_packages "doctest" doctest-dev
}

# The model checker and the compiler for what it writes; without them the tests of docs/models are skipped.
need_spin() {
  command -v spin >/dev/null && command -v gcc >/dev/null && return
  (need_packages "spin or gcc" spin gcc) || say "no spin: the models of the protocol between nodes are not checked"
}

# use_venv [EXTRA...]: makes the virtual environment if there is none, puts torch, the build tools and the named extras
# of pyproject.toml into it, and activates it. What is there already is not asked for again.
use_venv() {
  local python=${PYTHON:-python3} stamp wanted flags=() requirements
  command -v "$python" >/dev/null || need_packages "Python" python3
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || die "$python is older than 3.10; set PYTHON"
  if [ ! -x "$VENV/bin/pip" ]; then
    "$python" -c 'import ensurepip' 2>/dev/null || need_packages "Python's venv" python3-venv
    "$python" -c 'import os, sysconfig as s, sys; sys.exit(not os.path.exists(s.get_path("include") + "/Python.h"))' ||
      need_packages "Python.h" python3-dev
    if "$python" -c 'import torch' 2>/dev/null; then flags=(--system-site-packages); fi
    say "making $VENV"
    "$python" -m venv "${flags[@]}" "$VENV"
  fi
  # shellcheck disable=SC1091
  . "$VENV/bin/activate"
  requirements=$(python ci/requirements.py build "$@")
  stamp=$VENV/.deep_moe_requirements
  wanted=$(printf '%s\n' "${DEEP_MOE_TORCH:-}" "$requirements")
  if [ ! -e "$stamp" ] || [ -n "$(printf '%s\n' "$wanted" | grep -vxFf "$stamp" || true)" ]; then
    if ! python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)'; then
      say "installing ${DEEP_MOE_TORCH:-torch==2.13.0}"
      python -m pip install -q "${DEEP_MOE_TORCH:-torch==2.13.0}"
    fi
    say "installing build tools${*:+ and extras: $*}"
    printf '%s\n' "$requirements" | python -m pip install -q -r /dev/stdin
    printf '%s\n' "$wanted" | sort -u - $([ -e "$stamp" ] && echo "$stamp") -o "$stamp"
  fi
  export CMAKE_GENERATOR=${CMAKE_GENERATOR:-Ninja}
}

# build_wheel FOLDER [CMAKE_DEFINE...]: one wheel in FOLDER, built in build/<tag> so that a second run is quick.
build_wheel() {
  local folder=$1 define arguments=()
  shift
  for define in "DEEP_MOE_CUDA=${DEEP_MOE_CUDA:-AUTO}" "$@"; do
    arguments+=("--config-settings=cmake.define.$define")
  done
  need_compiler
  rm -rf "$folder"
  python -m pip wheel -q --no-build-isolation --no-deps -w "$folder" "--config-settings=build-dir=build/{wheel_tag}" "${arguments[@]}" .
}

# Installs that wheel over whatever version of it is there; what it depends on comes from the index if it is missing.
install_wheel() {
  python -m pip install -q "$1"/deep_moe-*.whl
  python -m pip install -q --force-reinstall --no-deps "$1"/deep_moe-*.whl
}

# under_sanitizers FOLDER PROGRAM [ARGUMENT...]: GPU tests, reduced, under memcheck, racecheck (which looks at
# shared memory alone) and synccheck; side by side, for most of their time is the host's. Logs in FOLDER.
under_sanitizers() {
  local folder=$1 tool pid failed=() tools=()
  shift
  export DEEP_MOE_GPU_STRESS_CALLS=${DEEP_MOE_GPU_STRESS_CALLS:-100}
  mkdir -p "$folder"
  say "compute-sanitizer: memcheck, racecheck, synccheck"
  for tool in memcheck racecheck synccheck; do
    compute-sanitizer --tool "$tool" --error-exitcode 9 "$@" >"$folder/$tool.log" 2>&1 &
    tools[$!]=$tool
  done
  for pid in "${!tools[@]}"; do
    wait "$pid" || failed+=("${tools[$pid]}")
    tail -n 3 "$folder/${tools[$pid]}.log"
  done
  [ ${#failed[@]} = 0 ] || die "failed: ${failed[*]}; see $folder"
}
