#!/usr/bin/env bash
# Style and types: ruff, mypy (strict), clang-format, shell syntax, and the rules on who may include whom.
# ci/lint.sh --fix formats in place first.
. "$(dirname "$0")/common.sh"
use_venv run lint
mapfile -t cpp_files < <(find cpp examples tests \( -name '*.hpp' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh' \))
python_files=(python tests ci docs examples)

if [ "${1:-}" = --fix ]; then
  ruff check -q --fix "${python_files[@]}" || true
  ruff format -q "${python_files[@]}"
  clang-format -i "${cpp_files[@]}"
fi

failed=0
check() {
  local name=$1
  shift
  if "$@"; then echo "ok      $name"; else echo "FAILED  $name"; failed=1; fi
}

# forbid WHAT PATTERN FOLDER...: no source line there matches.
forbid() {
  local what=$1 pattern=$2
  shift 2
  if grep -rnE --include='*.hpp' --include='*.cc' --include='*.cu' --include='*.cuh' "$pattern" "$@"; then
    echo "  $what"
    return 1
  fi
}

formatted() {
  local file bad=0
  for file in "${cpp_files[@]}"; do
    clang-format "$file" | cmp -s - "$file" || { echo "  $file: ci/lint.sh --fix formats it"; bad=1; }
  done
  return "$bad"
}

shell_syntax() { local file; for file in ci/*.sh install.sh .ci/run; do [ ! -e "$file" ] || bash -n "$file" || return 1; done; }

outside_python=(cpp/include cpp/layout cpp/runtime cpp/cpu cpp/cuda cpp/kernels)
check "ruff check" ruff check "${python_files[@]}"
check "ruff format" ruff format --check "${python_files[@]}"
check "mypy" mypy
check "mypy of docs" mypy docs/models/*.py
check "clang-format" formatted
check "shell syntax" shell_syntax
check "no torch in C++" forbid "nothing includes libtorch" '#include *[<"](torch|ATen|c10)/' cpp
check "no Python outside cpp/python" forbid "only cpp/python includes Python" \
  '#include *[<"](Python\.h|nanobind)' "${outside_python[@]}"
check "public headers" forbid "cpp/include includes only itself and the standard library" '#include *"' cpp/include
check "layout" forbid "cpp/layout includes only itself" '#include *"(runtime|cpu|kernels|python)/' cpp/layout
check "kernels" forbid "cpp/kernels includes only itself and cpp/layout" '#include *"(runtime|cpu|python)/' cpp/kernels
check "host code" forbid "of the kernels, cpp/runtime and cpp/cuda include api.hpp alone" \
  '#include *"kernels/(ptx|protocol|intranode)|#include *"python/' cpp/runtime cpp/cuda
check "inline PTX" forbid "inline PTX stands in cpp/kernels/ptx alone" '\basm\b *(volatile)? *\(' \
  $(find cpp/kernels -mindepth 1 -maxdepth 1 ! -name ptx)
exit "$failed"
