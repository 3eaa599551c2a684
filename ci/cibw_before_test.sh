#!/usr/bin/env bash
# Before a wheel is installed to be tested: torch, as what the wheel asks for could be a build of several GB.
#   DEEP_MOE_TORCH   what to install (torch==2.13.0; a CPU build is enough)
set -euo pipefail
read -ra torch <<<"${DEEP_MOE_TORCH:-torch==2.13.0}"
python -c 'import torch' 2>/dev/null || python -m pip install -q "${torch[@]}"
