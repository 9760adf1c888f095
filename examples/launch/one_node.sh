#!/usr/bin/env bash
# One machine: torchrun starts the ranks, and all of them again from the newest checkpoint when one dies.
#
#   RANKS=8 examples/launch/one_node.sh configs/llama3_8b.toml parallel.tp=8
set -euo pipefail

exec torchrun --standalone --nproc-per-node "${RANKS:?set RANKS to the number of ranks}" \
    --max-restarts "${MAX_RESTARTS:-10}" -m plait train "$@"
