#!/usr/bin/env bash
# The pipeline's own files: workflows against their schema, zizmor's audits and our rules (ci/check_workflows.py), and
# cibuildwheel's list of builds. Needs no network.
. "$(dirname "$0")/common.sh"
use_venv pipeline
workflows=(.github/workflows/*.yml)
check-jsonschema --builtin-schema vendor.github-workflows "${workflows[@]}"
zizmor --offline --quiet --no-progress "${workflows[@]}"
python ci/check_workflows.py "${workflows[@]}"

wanted=$(printf '%s\n' cp31{0,1,2}-manylinux_{x86_64,aarch64} | sort)
builds=$(python -m cibuildwheel --print-build-identifiers --platform linux | sort)
[ "$builds" = "$wanted" ] || die "cibuildwheel would build $(echo $builds), not $(echo $wanted)"
echo "cibuildwheel: $(echo $builds)"
