#!/usr/bin/env bash
# The wheels of a release: ci/wheels.sh [VARIANT...], of cpu, cu12 and cu13; all three if none is named. Works on any Linux,
# without containers, and in manylinux images too. build/wheelhouse gets one wheel for each variant and Python version;
# build/wheels is what they are made in. docs/packaging.md tells more.
#
#   DEEP_MOE_WHEEL_PYTHONS   CPython versions ("3.10 3.11 3.12"; from 3.12 on a wheel serves all later ones)
#   DEEP_MOE_WHEEL_CHECK     0 leaves out ci/check_wheel.py
#   DEEP_MOE_TORCH           what the check installs for interpreters without torch (nothing: it loads the module alone)
#   CUDA12_HOME, CUDA13_HOME toolkits; else nvcc on PATH or /usr/local/cuda-<major>*, else ci/cuda_toolkit.sh gets one
#   NVSHMEM12_DIR, NVSHMEM13_DIR   NVSHMEM for the network plug-in; else ci/nvshmem.sh gets it
#   CC, CXX                  compilers; else the system's where its glibc is no newer than 2.28, else those of
#                            ci/manylinux_toolchain.sh
#   SOURCE_DATE_EPOCH        time stamp of all files (that of the last commit)
# and for the kernels DEEP_MOE_CUDA_ARCHITECTURES, TORCH_CUDA_ARCH_LIST and the others of docs/install.md.
architectures=${DEEP_MOE_CUDA_ARCHITECTURES:-}
. "$(dirname "$0")/common.sh"
export DEEP_MOE_CUDA_ARCHITECTURES=$architectures # not common.sh's one architecture
variants=("$@")
[ $# -gt 0 ] || variants=(cpu cu12 cu13)
read -ra versions <<<"${DEEP_MOE_WHEEL_PYTHONS:-3.10 3.11 3.12}"
work=$REPO/build/wheels
house=$REPO/build/wheelhouse
mkdir -p "$work" "$house"

# The newest time stamp that the source itself knows.
if [ -z "${SOURCE_DATE_EPOCH:-}" ]; then
  SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || stat -c %Y pyproject.toml)
fi
export SOURCE_DATE_EPOCH

# ---- the tools: one virtual environment a Python version, versions pinned; the first one also repairs and checks.
environment() { echo "$work/venv-$1"; }
make_environment() { # VERSION EXTRA...
  local version=$1 folder python requirements stamp
  shift
  folder=$(environment "$version")
  stamp=$folder/.deep_moe_requirements
  python=$(ci/find_python.sh "$version")
  requirements=$("${PYTHON:-python3}" ci/requirements.py "$@")
  if [ "$(cat "$stamp" 2>/dev/null)" != "$requirements" ] || [ ci/wheel_constraints.txt -nt "$stamp" ]; then
    say "tools for Python $version: $*"
    "$python" -m venv --clear "$folder"
    printf '%s\n' "$requirements" | "$folder/bin/python" -m pip install -qq -c ci/wheel_constraints.txt -r /dev/stdin
    printf '%s\n' "$requirements" >"$stamp"
  fi
}

# ---- the compilers.
set_compilers() {
  local libc
  libc=$(getconf GNU_LIBC_VERSION | cut -d' ' -f2)
  if [ -z "${CXX:-}" ] && [ "$(printf '%s\n' "$libc" 2.28 | sort -V | tail -n 1)" != 2.28 ]; then
    if [ ! -x "$work/toolchain/bin/g++" ]; then
      say "glibc $libc is newer than 2.28: getting an older one"
      ci/manylinux_toolchain.sh "$work/toolchain"
    fi
    CC=$work/toolchain/bin/gcc CXX=$work/toolchain/bin/g++
  fi
  export CC=${CC:-gcc} CXX=${CXX:-g++}
  export CUDAHOSTCXX=${CUDAHOSTCXX:-$CXX}
}
nvcc_major() { "$1" --version 2>/dev/null | sed -n 's/.*release \([0-9]*\)\..*/\1/p'; }
find_nvcc() { # MAJOR
  local home=CUDA$1_HOME candidate
  for candidate in "${!home:+${!home}/bin/nvcc}" "$(command -v nvcc || true)" /usr/local/cuda-"$1"*/bin/nvcc "$work/cuda$1/bin/nvcc"; do
    if [ -x "$candidate" ] && [ "$(nvcc_major "$candidate")" = "$1" ]; then
      echo "$candidate"
      return
    fi
  done
  ci/cuda_toolkit.sh "$1" "$work/cuda$1" >&2
  echo "$work/cuda$1/bin/nvcc"
}

find_nvshmem() { # MAJOR
  local given=NVSHMEM$1_DIR
  if [ -n "${!given:-}" ]; then
    echo "${!given}"
  else
    ci/nvshmem.sh "$1" "$work/nvshmem-cu$1"
  fi
}

# ---- one variant: its tree, its library, then a module and a wheel for each Python version.
build_variant() {
  local variant=$1 base=$work/$1 version python started=$SECONDS cuda=OFF nvshmem=
  say "$variant"
  rm -rf "$base"
  mkdir -p "$base/src" "$base/raw"
  { git ls-files --cached --others --exclude-standard -z 2>/dev/null || find . -path ./build -prune -o -type f -print0; } |
    while IFS= read -r -d '' file; do if [ -e "$file" ]; then printf '%s\0' "$file"; fi; done |
    tar -c --null -T - | tar -x -C "$base/src"
  unset CUDACXX
  if [ "$variant" != cpu ]; then
    nvshmem=$(find_nvshmem "${variant#cu}")
    CUDACXX=$(find_nvcc "${variant#cu}")
    export CUDACXX
    cuda=ON
  fi
  "$tools/python" ci/set_variant.py "$base/src" "$variant" ${nvshmem:+nvshmem}
  # Neither the place of the build nor that of the tools shows in what is built.
  local map="-ffile-prefix-map=$base/src=deep_moe -ffile-prefix-map=$work=build"
  export CFLAGS=$map CXXFLAGS=$map CUDAFLAGS="-Xcompiler=${map// /,}"
  PATH=$tools:$PATH cmake -S "$base/src" -B "$base/lib" -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_INSTALL_PREFIX="$base/prefix" -DDEEP_MOE_CUDA=$cuda -DDEEP_MOE_NVSHMEM_DIR="$nvshmem" -DDEEP_MOE_WERROR=OFF >"$base/configure.log" ||
    { cat "$base/configure.log"; die "configuring $variant failed"; }
  tail -n 4 "$base/configure.log" | grep '^-- deep_moe'
  PATH=$tools:$PATH cmake --build "$base/lib" --parallel "$JOBS" >"$base/build.log" ||
    { grep -A 20 FAILED "$base/build.log"; die "building $variant failed: $base/build.log"; }
  PATH=$tools:$PATH cmake --install "$base/lib" >/dev/null
  strip -g -D "$base/prefix/lib/libdeep_moe.a" # with the names of nvcc's temporary files
  echo "library: $((SECONDS - started)) s"
  for version in "${versions[@]}"; do
    started=$SECONDS
    python=$(environment "$version")/bin/python
    (cd "$base/src" && PATH=$(dirname "$python"):$PATH CMAKE_GENERATOR=Ninja CMAKE_BUILD_PARALLEL_LEVEL=$JOBS "$python" -m pip wheel -qq \
      --no-build-isolation --no-deps -w "$base/raw" --config-settings=build-dir="$base/$version" \
      --config-settings=cmake.define.DEEP_MOE_CUDA=$cuda --config-settings=cmake.define.DEEP_MOE_PREFIX="$base/prefix" .)
    echo "module for Python $version: $((SECONDS - started)) s"
  done
  PATH=$tools:$PATH ci/repair_wheel.sh "$house" "$base"/raw/*.whl >"$base/repair.log" 2>&1 ||
    { cat "$base/repair.log"; die "auditwheel refused $variant"; }
}

for variant in "${variants[@]}"; do
  case $variant in
    cpu | cu12 | cu13) ;;
    *) die "variant is '$variant'; allowed: cpu, cu12, cu13" ;;
  esac
done
for version in "${versions[@]}"; do
  make_environment "$version" build $([ "$version" != "${versions[0]}" ] || echo release)
done
tools=$(environment "${versions[0]}")/bin
set_compilers
[ $# -gt 0 ] || rm -f "$house"/*.whl
for variant in "${variants[@]}"; do build_variant "$variant"; done

say "build/wheelhouse"
(cd "$house" && ls -l -- *.whl && sha256sum -- *.whl >SHA256SUMS)
[ "${DEEP_MOE_WHEEL_CHECK:-1}" != 0 ] || exit 0

# Interpreters that are here; one that has torch lends it, for others $DEEP_MOE_TORCH is installed if it is set.
say "checks"
checks=()
for version in 3.10 3.11 3.12 3.13; do
  if python=$(ci/find_python.sh "$version" 2>/dev/null); then checks+=(--python "$python"); fi
done
PATH=$tools:$PATH "$tools/python" ci/check_wheel.py "${checks[@]}" ${DEEP_MOE_TORCH:+--torch "$DEEP_MOE_TORCH"} "$house"/*.whl
