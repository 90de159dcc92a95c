#!/usr/bin/env bash
# Train on this machine's CPUs, also where it has GPUs: launch/cpu.sh CONFIG RANKS [key=value ...]
set -euo pipefail
if [ "$#" -lt 2 ]; then
  echo "usage: $0 CONFIG RANKS [key=value ...]" >&2
  exit 2
fi
export DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES=
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(($(nproc) > $2 ? $(nproc) / $2 : 1))}"
exec cqwen launch "$1" --ranks "$2" "${@:3}"
