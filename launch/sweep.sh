#!/usr/bin/env bash
# The runs of slurm/sweep.sbatch one after the other on this machine: launch/sweep.sh RANKS CONFIG POINTS [key=value ...]
# POINTS is a text file, one run a line: overrides as a shell would read them. Run N (from 0) lives in the folder N of the
# config's run.dir; a run that is done is skipped, so the same command resumes. `cqwen report RUN_DIR/*` compares.
set -euo pipefail
if [ "$#" -lt 3 ]; then
  echo "usage: $0 RANKS CONFIG POINTS [key=value ...]" >&2
  exit 2
fi
ranks=$1 config=$2 points=$3
shift 3
runs=$(grep -cEv '^[[:space:]]*(#|$)' "$points" || true)
for ((number = 0; number < runs; number++)); do
  words=()
  while IFS= read -r -d '' word; do words+=("$word"); done \
    < <(python3 -m cqwen_dist.cluster.job point "$number" "$config" "$points" "$@")
  if [ "${#words[@]}" -eq 0 ]; then exit 2; fi # the error is printed
  echo "run $number of $runs: ${words[*]}"
  python3 -m cqwen_dist launch --ranks "$ranks" "${words[@]}"
done
