#!/usr/bin/env bash
# Everything that is quick: lint, pipeline, wheel, stubs, C++ tests, sanitizers, Python tests, packaging. Ends with a
# summary; exit status 0 only if all of it passed. Each step is a script of its own.
. "$(dirname "$0")/common.sh"
summary=()
passed=0
failed=0

step() {
  local name=$1 started=$SECONDS status=0
  shift
  say "$name: $*"
  "$@" || status=$?
  if [ "$status" = 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
  summary+=("$(printf '%-8s %-18s %5d s' "$([ "$status" = 0 ] && echo passed || echo FAILED)" "$name" $((SECONDS - started)))")
  return "$status"
}

finish() {
  say "summary of ci/test.sh ($SECONDS s)"
  printf '%s\n' "${summary[@]}"
  echo "steps: $passed passed, $failed failed"
  [ "$failed" = 0 ]
}

need_doctest
use_venv run test lint pipeline
step lint ci/lint.sh || true
step pipeline ci/pipeline.sh || true
if git rev-parse HEAD >/dev/null 2>&1; then step "source dist" ci/sdist.sh check || true; fi
step wheel ci/wheel.sh || { finish; exit 1; }
step stubs ci/stubs.sh || true
if step "C++ build" ci/build_cpp.sh; then
  step "C++ tests" ci/cpp_tests.sh || true
  step packaging ci/packaging_tests.sh || true
fi
step example ci/example.sh || true
step "thread sanitizer" ci/sanitize.sh thread || true
step "address sanitizer" ci/sanitize.sh address || true
step "Python tests" ci/python_tests.sh || true
finish
