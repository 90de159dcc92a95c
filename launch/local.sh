#!/usr/bin/env bash
# Train on this machine under DeepSpeed's launcher: launch/local.sh CONFIG RANKS [key=value ...]
# CPU ranks where there are GPUs: DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES= launch/local.sh ...
set -euo pipefail
if [ "$#" -lt 2 ]; then
  echo "usage: $0 CONFIG RANKS [key=value ...]" >&2
  exit 2
fi
config=$1 ranks=$2
shift 2
[ -e /dev/nvidia0 ] || export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}" # else DeepSpeed guesses, and says so
if [ "${DS_ACCELERATOR:-}" = cpu ]; then export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((($(nproc) + ranks - 1) / ranks))}"; fi
exec deepspeed --num_accelerators "$ranks" --module cqwen_dist train "$config" "$@"
