#!/usr/bin/env bash
# Train on this machine: launch/local.sh CONFIG RANKS [key=value ...]
# The same as `cqwen launch CONFIG --ranks RANKS ...`, for those who would rather see the launcher's own line.
set -euo pipefail
if [ "$#" -lt 2 ]; then
  echo "usage: $0 CONFIG RANKS [key=value ...]" >&2
  exit 2
fi
config=$1 ranks=$2
shift 2
[ -e /dev/nvidia0 ] || export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}"
exec deepspeed --num_accelerators "$ranks" --module cqwen_dist train "$config" "$@"
