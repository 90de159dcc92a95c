#!/usr/bin/env bash
# The same as launch/hosts.sh without ssh and pdsh: launch/nodes.sh CONFIG HOSTFILE NODE_RANK MASTER_ADDR [key=value ...]
# Call it on each host, with NODE_RANK 0, 1, ... in the order of the hostfile. MASTER_ADDR: the first host, as all see it.
# MASTER_PORT (default 29500) must be the same, and free on the first host.
set -euo pipefail
if [ "$#" -lt 4 ]; then
  echo "usage: $0 CONFIG HOSTFILE NODE_RANK MASTER_ADDR [key=value ...]" >&2
  exit 2
fi
config=$1 meeting=(--hostfile "$2" --no_ssh --node_rank "$3" --master_addr "$4" --master_port "${MASTER_PORT:-29500}")
shift 4
[ -e /dev/nvidia0 ] || export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}" # else DeepSpeed guesses, and says so
exec deepspeed "${meeting[@]}" --module cqwen_dist train "$config" "$@"
