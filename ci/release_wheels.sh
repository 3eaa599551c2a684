#!/usr/bin/env bash
# The release wheels of one variant and this machine's architecture: ci/release_wheels.sh cpu|cu12|cu13
# Where Docker or Podman works, cibuildwheel makes them in manylinux images, as [tool.cibuildwheel] in pyproject.toml
# says; elsewhere ci/wheels.sh does. Either way they are repaired, checked, and lie in build/wheelhouse.
#   DEEP_MOE_WHEEL_PYTHONS   CPython versions ("3.10 3.11 3.12")
#   DEEP_MOE_CONTAINERS      0: no containers even where there are some
architectures=${DEEP_MOE_CUDA_ARCHITECTURES:-}
. "$(dirname "$0")/common.sh"
export DEEP_MOE_CUDA_ARCHITECTURES=$architectures # not common.sh's one architecture
variant=${1:-}
case $variant in
  cpu | cu12 | cu13) ;;
  *) die "variant is '$variant'; allowed: cpu, cu12, cu13" ;;
esac

engine=
if [ "${DEEP_MOE_CONTAINERS:-1}" != 0 ]; then
  for candidate in docker podman; do
    if "$candidate" info >/dev/null 2>&1; then engine=$candidate; break; fi
  done
fi
if [ -z "$engine" ]; then
  echo "no container engine here: the wheels are made on this machine"
  exec ci/wheels.sh "$variant"
fi

use_venv pipeline release
tree=build/cibuildwheel/$variant
rm -rf "$tree"
mkdir -p "$tree" build/wheelhouse
git ls-files -z | tar -c --null -T - | tar -x -C "$tree"
nvshmem=
[ "$variant" = cpu ] || nvshmem=/usr/local/nvshmem/nvidia/nvshmem # where ci/cibw_before_all.sh puts it
python ci/set_variant.py "$tree" "$variant" ${nvshmem:+nvshmem}
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH DEEP_MOE_VARIANT=$variant CIBW_CONTAINER_ENGINE=$engine
CIBW_CONFIG_SETTINGS="cmake.define.DEEP_MOE_CUDA=$([ "$variant" = cpu ] && echo OFF || echo ON)"
[ -z "$nvshmem" ] || CIBW_CONFIG_SETTINGS+=" cmake.define.DEEP_MOE_NVSHMEM_DIR=$nvshmem"
export CIBW_CONFIG_SETTINGS
if [ -n "${DEEP_MOE_WHEEL_PYTHONS:-}" ]; then
  CIBW_BUILD=$(for version in $DEEP_MOE_WHEEL_PYTHONS; do printf 'cp%s-* ' "${version/./}"; done)
  export CIBW_BUILD
fi
(cd "$tree" && python -m cibuildwheel --platform linux --archs "$(uname -m)" --output-dir "$REPO/build/wheelhouse")
ls -l build/wheelhouse
python ci/check_wheel.py build/wheelhouse/*.whl
