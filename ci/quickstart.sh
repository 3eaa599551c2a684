#!/usr/bin/env bash
# From a fresh clone to a running benchmark: a virtual environment, the package built from source, `deep-moe bench`.
# Arguments go to the benchmark: ci/quickstart.sh --ranks 2
. "$(dirname "$0")/common.sh"
started=$SECONDS

use_venv
say "building and installing deep_moe (CUDA ${DEEP_MOE_CUDA:-AUTO})"
build_wheel build/dist
install_wheel build/dist

say "deep-moe doctor"
deep-moe doctor
say "deep-moe bench $*"
deep-moe bench "$@"
say "done in $((SECONDS - started)) s; next: . $(realpath --relative-to="$REPO" "$VENV")/bin/activate && deep-moe bench --help"
