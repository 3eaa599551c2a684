#!/usr/bin/env bash
# The C++ tests under a sanitizer: ci/sanitize.sh thread|address [CTEST ARGUMENT...]
. "$(dirname "$0")/common.sh"
case ${1:-} in
  thread) preset=tsan ;;
  address) preset=asan ;;
  *) die "usage: ci/sanitize.sh thread|address [CTEST ARGUMENT...]" ;;
esac
shift
need_doctest
use_venv
cmake --preset "$preset" >/dev/null
cmake --build --preset "$preset" --parallel "$JOBS"

# Kernels that spread mappings over more bits than gcc 12's ThreadSanitizer knows: run without randomised addresses.
fixed_addresses=()
if setarch "$(uname -m)" -R true 2>/dev/null; then fixed_addresses=(setarch "$(uname -m)" -R); fi
export TSAN_OPTIONS="halt_on_error=1 second_deadlock_stack=1 ${TSAN_OPTIONS:-}"
export ASAN_OPTIONS="detect_stack_use_after_return=1 strict_string_checks=1 ${ASAN_OPTIONS:-}"
export UBSAN_OPTIONS="print_stacktrace=1 ${UBSAN_OPTIONS:-}"
"${fixed_addresses[@]}" ctest --preset "$preset" "$@"
