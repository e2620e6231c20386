#!/usr/bin/env bash
# Trains on several nodes with torchrun. Run it on every node, each with its own number; node 0 is the head.
#
#     NODES=2 NODE_RANK=0 HEAD=node0 recipes/launch/torchrun.sh recipes/qwen3-8xh200.toml --set plan.cluster=2x8xH200
#
# All nodes need the same installation, and config, data and run.output at the same paths of a shared file system.
set -euo pipefail
: "${NODES:?how many nodes take part}" "${NODE_RANK:?the number of this node, from 0}" "${HEAD:?host name or address of node 0}"

# Plans change the sizes of buffers from step to step, which fragments fixed segments of GPU memory.
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"

# Static rendezvous: ranks are numbered by NODE_RANK, so the ranks of a node follow each other, as plans assume.
exec torchrun --nnodes "$NODES" --node-rank "$NODE_RANK" --nproc-per-node "${RANKS_PER_NODE:-gpu}" \
    --rdzv-backend static --rdzv-endpoint "$HEAD:${PORT:-29500}" \
    -m seqloom train "$@"
