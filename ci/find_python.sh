#!/usr/bin/env bash
# Prints the interpreter of a CPython version that has its headers: ci/find_python.sh 3.12
# Looked at, in this order: $PYTHON3_12, python3.12 on PATH, /opt/python (manylinux images), pyenv, uv.
set -euo pipefail
version=${1:?usage: ci/find_python.sh VERSION}
override=PYTHON${version/./_}
compact=cp${version/./}
candidates=()
if [ -n "${!override:-}" ]; then candidates+=("${!override}"); fi
candidates+=("python$version" "/opt/python/$compact-$compact/bin/python")
for folder in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version".*; do candidates+=("$folder/bin/python"); done
if command -v uv >/dev/null; then candidates+=("$(uv python find "$version" 2>/dev/null || true)"); fi

for candidate in "${candidates[@]}"; do
  [ -n "$candidate" ] || continue
  if "$candidate" - "$version" 2>/dev/null <<'P'; then
import os, sys, sysconfig
fits = "%d.%d" % sys.version_info[:2] == sys.argv[1] and sys.implementation.name == "cpython"
sys.exit(not (fits and os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))))
P
    "$candidate" -c 'import sys; print(sys.executable)'
    exit 0
  fi
done
echo "find_python.sh: no CPython $version with Python.h; install it (pyenv install $version, uv python install $version," \
  "or the system's python$version-dev), or set $override" >&2
exit 1
