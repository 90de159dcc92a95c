#!/usr/bin/env bash
# Train on the hosts of a hostfile, over ssh: launch/hosts.sh CONFIG HOSTFILE [key=value ...]
# Hostfile: lines `host slots=N`. Their environment: launch/environment.example, copied to .deepspeed_env.
set -euo pipefail
if [ "$#" -lt 2 ]; then
  echo "usage: $0 CONFIG HOSTFILE [key=value ...]" >&2
  exit 2
fi
config=$1 hostfile=$2
shift 2
exec cqwen launch "$config" --hostfile "$hostfile" "$@"
