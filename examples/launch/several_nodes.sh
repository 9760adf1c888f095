#!/usr/bin/env bash
# Several machines: run it on each of them, with its number in NODE and the address of machine 0 in HOST.
# When a rank dies, the ranks of all machines are started again from the newest checkpoint, which all must be able to read.
#
#   NODES=2 NODE=0 HOST=10.0.0.1 RANKS=8 examples/launch/several_nodes.sh configs/llama3_8b.toml parallel.dp_replicate=2
#
# ADDRESS is that of this machine by which the others reach it, where its host name does not resolve to it, and
# GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME the interface that has it.
set -euo pipefail

node="${NODE:?set NODE to the number of this machine, from 0}"
if [ "$node" = 0 ]; then is_host=true; else is_host=false; fi

exec torchrun --nnodes "${NODES:?set NODES to the number of machines}" \
    --nproc-per-node "${RANKS:?set RANKS to the number of ranks of a machine}" \
    --node-rank "$node" ${ADDRESS:+--local-addr "$ADDRESS"} \
    --rdzv-backend c10d --rdzv-id "${JOB:-plait}" --rdzv-conf "is_host=$is_host" \
    --rdzv-endpoint "${HOST:?set HOST to the address of machine 0}:${PORT:-29400}" \
    --max-restarts "${MAX_RESTARTS:-10}" -m plait train "$@"
