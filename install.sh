#!/usr/bin/env bash
# Builds deep_moe from this tree and installs it: looks at the machine first, says what it will build, then does it.
#   ./install.sh [OPTION...]
#     --dry-run         look and tell alone
#     --cuda WHEN       auto (where a working nvcc is; default), on (an error without), off
#     --archs LIST      GPU architectures, such as "80;90a" (this machine's GPUs; else all that the kernels are tuned for)
#     --python PYTHON   interpreter to install for (python3)
#     --venv FOLDER     install into this virtual environment; it is made if there is none
#     --jobs N          compile jobs (as many as cores and memory allow)
#     --force           go on where a check has failed
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
usage() { sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

dry_run=0 cuda=auto archs='' python=${PYTHON:-python3} venv='' jobs='' force=0
while [ $# -gt 0 ]; do
  option=$1
  case $option in
    --dry-run) dry_run=1 ;;
    --force) force=1 ;;
    -h | --help) usage; exit 0 ;;
    --cuda | --archs | --python | --venv | --jobs)
      [ $# -ge 2 ] || { echo "install.sh: $option needs a value" >&2; exit 2; }
      printf -v "${option#--}" %s "$2"
      shift
      ;;
    *) echo "install.sh: unknown option '$option'" >&2; usage >&2; exit 2 ;;
  esac
  shift
done
case $cuda in auto | on | off) ;; *) echo "install.sh: --cuda is '$cuda'; allowed: auto, on, off" >&2; exit 2 ;; esac
case $jobs in *[!0-9]* | 0) echo "install.sh: --jobs is '$jobs'; allowed: 1 and more" >&2; exit 2 ;; esac

problems=0
ok() { printf '  ok       %-10s %s\n' "$1" "$2"; }
note() { printf '  note     %-10s %s\n' "$1" "$2"; }
problem() { # WHAT TEXT REMEDY
  printf '  PROBLEM  %-10s %s\n                      -> %s\n' "$1" "$2" "$3"
  problems=$((problems + 1))
}
at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; } # VERSION MINIMUM

# ---- the machine
check_system() {
  if [ "$(uname -s)" = Linux ]; then ok system "Linux $(uname -m)"; else
    problem system "$(uname -s)" "deep_moe runs on Linux; on others, use a container or a virtual machine"
  fi
}

# ---- Python: version, headers, and that pip may install there
check_python() {
  if [ -n "$venv" ] && [ -x "$venv/bin/python" ]; then python=$venv/bin/python; fi
  if ! command -v "$python" >/dev/null; then
    problem python "'$python' is not there" "install Python 3.10 or newer, or name one: --python PYTHON"
    python=
    return
  fi
  local version header managed
  version=$("$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])')
  if at_least "$version" 3.10; then ok python "$version ($(command -v "$python"))"; else
    problem python "$version is too old" "install Python 3.10 or newer, or name one: --python PYTHON"
  fi
  header=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
  [ -e "$header" ] || problem Python.h "$header is missing" "apt-get install python3-dev (dnf install python3-devel)"
  if [ -n "$venv" ]; then
    [ -x "$venv/bin/python" ] || "$python" -c 'import ensurepip' 2>/dev/null ||
      problem venv "$python cannot make virtual environments" "apt-get install python3-venv"
    return
  fi
  "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("pip") is None)' ||
    problem pip "$python has no pip" "./install.sh --venv .venv, or install pip"
  managed=$("$python" -c 'import os, sys, sysconfig as s
print(sys.prefix == sys.base_prefix and os.path.exists(s.get_path("stdlib") + "/EXTERNALLY-MANAGED"))')
  [ "$managed" = False ] ||
    problem pip "the system manages $python's packages" "./install.sh --venv .venv, or activate an environment"
}

# ---- the C++ compiler
check_compiler() {
  local cxx=${CXX:-c++} macros version name=gcc minimum=10
  if ! command -v "${cxx%% *}" >/dev/null; then
    problem compiler "'$cxx' is not there" "apt-get install g++ (dnf install gcc-c++), or set CXX"
    return
  fi
  macros=$($cxx -dM -E -x c++ /dev/null 2>/dev/null || true)
  macro() { sed -n "s/^#define $1 //p" <<<"$macros"; }
  if [ -n "$(macro __clang_major__)" ]; then
    name=clang minimum=12 version=$(macro __clang_major__).$(macro __clang_minor__)
  elif [ -n "$(macro __GNUC__)" ]; then
    version=$(macro __GNUC__).$(macro __GNUC_MINOR__)
  else
    problem compiler "'$cxx' is neither gcc nor clang" "set CXX to gcc 10 or newer, or clang 12 or newer"
    return
  fi
  if at_least "$version" "$minimum"; then ok compiler "$name $version ($cxx)"; else
    problem compiler "$name $version is too old" "gcc 10 or newer, or clang 12 or newer: set CXX=g++-12, say"
  fi
}

# ---- nvcc, and whether driver and torch go with it
find_nvcc() {
  local candidate
  for candidate in "${CUDACXX:-}" "$(command -v nvcc || true)" "${CUDA_HOME:+$CUDA_HOME/bin/nvcc}" \
    "${CUDA_PATH:+$CUDA_PATH/bin/nvcc}" /usr/local/cuda/bin/nvcc; do
    if [ -n "$candidate" ] && [ -x "$candidate" ]; then echo "$candidate"; return; fi
  done
}
# no_cuda TEXT REMEDY: an error where CUDA was asked for, else a note.
no_cuda() {
  with_cuda=0
  if [ "$cuda" = on ]; then problem nvcc "$1" "$2, or --cuda off"; else note nvcc "$1: the CPU backend alone ($2)"; fi
}
check_cuda() {
  local nvcc version work driver gpus number
  with_cuda=1 cuda_major=
  gpus=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -d ' .' | sort -u || true)
  case $gpus in *[!0-9$'\n']*) gpus= ;; esac
  if [ "$cuda" = off ]; then with_cuda=0; note nvcc "not looked for: --cuda off"; return; fi
  nvcc=$(find_nvcc)
  if [ -z "$nvcc" ]; then no_cuda "not found" "install the CUDA toolkit 12.4 or newer, or set CUDACXX"; return; fi
  version=$("$nvcc" --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\),.*/\1/p')
  if ! at_least "${version:-0}" 12.4; then
    no_cuda "$nvcc is ${version:-broken}; 12.4 is the oldest that serves" "install a newer CUDA toolkit, or set CUDACXX"
    return
  fi
  work=$(mktemp -d)
  echo '__global__ void kernel() {}' >"$work/probe.cu"
  local compile=("$nvcc" ${CUDAHOSTCXX:+-ccbin "$CUDAHOSTCXX"} -std=c++20 -c "$work/probe.cu" -o "$work/probe.o")
  if ! "${compile[@]}" >"$work/log" 2>&1; then
    no_cuda "$nvcc $version compiles nothing: $(grep -m 1 -iE 'error|unsupported' "$work/log" || head -n 1 "$work/log")" \
      "set CUDAHOSTCXX to an older compiler"
    rm -rf "$work"
    return
  fi
  rm -rf "$work"
  ok nvcc "$version ($nvcc)"
  export CUDACXX=$nvcc
  cuda_major=${version%%.*}
  driver=$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9.]*\).*/\1/p' | head -n 1 || true)
  if [ -z "$driver" ]; then
    note driver "none here: the kernels are built for other machines"
  elif [ "${driver%%.*}" -lt "$cuda_major" ]; then
    problem driver "is for CUDA $driver, nvcc is $version: the kernels would not run here" \
      "a newer driver, or set CUDACXX to an nvcc of CUDA ${driver%%.*}"
  else
    ok driver "for CUDA $driver"
  fi
  if [ -n "$archs" ]; then return; fi
  if [ -n "${DEEP_MOE_CUDA_ARCHITECTURES:-}${CMAKE_CUDA_ARCHITECTURES:-}${TORCH_CUDA_ARCH_LIST:-}" ]; then
    archs="as the environment says"
    return
  fi
  for number in $gpus; do
    if [ "$number" -lt 80 ]; then note gpu "sm_$number is older than sm_80 and will not be used"; continue; fi
    case $number in 90 | 100) number=${number}a ;; esac
    archs=${archs:+$archs;}$number-real
  done
}

check_torch() {
  needs_torch=0
  [ -n "$python" ] || return 0
  local found torch_cuda
  # torch/version.py says it at once; importing torch takes seconds.
  found=$("$python" -c 'import importlib.util as u, os, runpy
at = u.find_spec("torch").submodule_search_locations[0]
v = runpy.run_path(os.path.join(at, "version.py")); print(v["__version__"], v["cuda"] or "none")' 2>/dev/null || true)
  if [ -n "$found" ] && { [ -z "$venv" ] || [ -x "$venv/bin/python" ]; }; then
    torch_cuda=${found##* }
    ok torch "${found% *} (CUDA: $torch_cuda)"
    at_least "${found%%[+ ]*}" 2.4 || problem torch "${found% *} is too old" "pip install 'torch>=2.4'"
    if [ "$with_cuda" = 1 ] && [ "$torch_cuda" = none ]; then
      note torch "has no CUDA: Python sees no GPU until a CUDA build of torch is installed"
    elif [ "$with_cuda" = 1 ] && [ "${torch_cuda%%.*}" != "$cuda_major" ]; then
      note torch "is for CUDA $torch_cuda, nvcc of $cuda_major: both work in one process if the driver is new enough"
    fi
  else
    needs_torch=1
    note torch "missing: pip takes the newest, several GB with CUDA (to choose, install it first)"
  fi
}

# ---- room, in GiB: a build takes a tenth of it, a compile job (C++ or CUDA) a third
check_room() {
  local disk memory cores limit needed=1 per_job=1
  [ "$needs_torch" = 0 ] || needed=$((needed + 8))
  disk=$(($(df -Pk . | awk 'NR == 2 {print $4}') / 1048576))
  if [ "$disk" -ge "$needed" ]; then ok disk "$disk GiB free, $needed needed"; else
    problem disk "$disk GiB free, $needed needed" "make room, or build elsewhere"
  fi
  memory=$(($(awk '/^MemAvailable/ {print $2}' /proc/meminfo) / 1048576)) cores=$(nproc)
  limit=$((memory / per_job))
  [ "$limit" -ge 1 ] ||
    problem memory "$memory GiB available; a compile job takes up to $per_job" "end other programs, or add swap"
  [ "$limit" -ge 1 ] || limit=1
  if [ -z "$jobs" ]; then jobs=$((cores < limit ? cores : limit)); fi
  if [ "$jobs" -gt "$limit" ]; then
    problem memory "$memory GiB available, $jobs jobs take up to $((jobs * per_job))" "--jobs $limit"
  else ok memory "$memory GiB available, $jobs compile jobs"; fi
}

echo "This machine:"
check_system
check_python
check_compiler
check_cuda
check_torch
check_room

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
echo "To be built:"
echo "  deep_moe $version: CPU backend, Python module, C++ library with CMake files"
if [ "$with_cuda" = 1 ]; then
  echo "  CUDA kernels for: ${archs:-all that they are tuned for, and PTX for later ones}"
else echo "  no CUDA kernels"; fi
echo "  into: ${venv:-${python:+$("$python" -c 'import sys; print(sys.prefix)')}}"

if [ "$problems" -gt 0 ]; then
  echo "$problems problem(s), see above."
  [ "$force" = 1 ] || { echo "Nothing was done (--force goes on all the same)."; exit 1; }
fi
if [ "$dry_run" = 1 ]; then echo "Nothing was done (--dry-run)."; exit 0; fi

if [ -n "$venv" ]; then
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  python=$venv/bin/python
fi
if [ "$with_cuda" = 1 ]; then define=ON; else define=OFF; fi
settings=("--config-settings=cmake.define.DEEP_MOE_CUDA=$define")
case $archs in
  '' | 'as the environment says') ;;
  *) settings+=("--config-settings=cmake.define.DEEP_MOE_CUDA_ARCHITECTURES=$archs") ;;
esac
set -x
CMAKE_BUILD_PARALLEL_LEVEL=$jobs "$python" -m pip install --disable-pip-version-check "${settings[@]}" .
{ set +x; } 2>/dev/null
"$python" -m deep_moe doctor
echo "Installed. Next: ${venv:+. $venv/bin/activate && }deep-moe bench"
