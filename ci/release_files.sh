#!/usr/bin/env bash
# What goes with a release: ci/release_files.sh [FOLDER], by default build/release. FOLDER/dist has the wheels and the
# source distribution (where it is missing, those of build/wheelhouse and build/sdist are copied there). Written beside it:
# sbom/*.cdx.json, one for each wheel, and SHA256SUMS of everything. In a pipeline that a tag has started, the tag must be
# that of the version.
. "$(dirname "$0")/common.sh"
folder=${1:-build/release}
use_venv pipeline
if [ ! -d "$folder/dist" ]; then
  mkdir -p "$folder/dist"
  cp build/wheelhouse/*.whl build/sdist/*.tar.gz "$folder/dist/"
fi
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
if [ "${GITHUB_REF_TYPE:-}" = tag ] && [ "$GITHUB_REF_NAME" != "v$version" ]; then
  die "the tag is $GITHUB_REF_NAME, the version in pyproject.toml $version"
fi
for file in "$folder"/dist/*; do
  case $(basename "$file") in
    deep_moe-"$version".tar.gz | deep_moe*-"$version"-*.whl) ;;
    *) die "$file is not of version $version" ;;
  esac
done
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || stat -c %Y pyproject.toml)}
export SOURCE_DATE_EPOCH
rm -rf "$folder/sbom"
python ci/sbom.py "$folder/sbom" "$folder"/dist/*.whl
cd "$folder"
find dist sbom -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum >SHA256SUMS
sha256sum --check --quiet SHA256SUMS
echo "$folder: $(wc -l <SHA256SUMS) files"
