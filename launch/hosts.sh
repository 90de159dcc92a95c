#!/usr/bin/env bash
# Train on the hosts of a hostfile under DeepSpeed's launcher, over ssh: launch/hosts.sh CONFIG HOSTFILE [key=value ...]
# Call it once, on the first host, which needs pdsh, and ssh to all hosts without a password. Without ssh: launch/nodes.sh.
# Hostfile: launch/hostfile.example. Environment of the ranks: launch/environment.example, copied to .deepspeed_env.
set -euo pipefail
if [ "$#" -lt 2 ]; then
  echo "usage: $0 CONFIG HOSTFILE [key=value ...]" >&2
  exit 2
fi
config=$1 hostfile=$2
shift 2
first=$(awk '!/^[ \t]*(#|$)/ { sub(/.*@/, "", $1); print $1; exit }' "$hostfile")
exec deepspeed --hostfile "$hostfile" --master_addr "$first" --module cqwen_dist train "$config" "$@"
