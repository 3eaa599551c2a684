#!/usr/bin/env bash
# The source distribution, into build/sdist: complete, with right metadata, and enough to build a wheel from, offline and
# without git. `ci/sdist.sh check` leaves out the wheel, which has to be compiled.
. "$(dirname "$0")/common.sh"
need_compiler
use_venv
folder=$REPO/build/sdist
rm -rf "$folder"
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || stat -c %Y pyproject.toml)}
export SOURCE_DATE_EPOCH
python -c 'import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])' "$folder" >/dev/null
python ci/check_sdist.py "$folder"/*.tar.gz
[ "${1:-}" != check ] || exit 0

# From the archive alone: no git, no index, and where the machine allows it no network at all.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
offline=()
if unshare -rn true 2>/dev/null; then offline=(unshare -rn); fi
say "a wheel from the source distribution ${offline[*]:+(without network)}"
started=$SECONDS
tar -xzf "$folder"/*.tar.gz -C "$work"
cd "$work"/deep_moe-*
GIT_DIR=/nonexistent PIP_NO_INDEX=1 CMAKE_BUILD_PARALLEL_LEVEL=$JOBS "${offline[@]}" \
  python -m pip wheel -q --no-build-isolation --no-deps -w "$work" --config-settings=cmake.define.DEEP_MOE_CUDA=OFF .
python ci/check_sdist.py --wheel "$work"/*.whl
echo "built in $((SECONDS - started)) s"
