#!/usr/bin/env bash
# Trains on several nodes with torchrun. Run it on every node, each with its own number; node 0 is the head.
#
#     NODES=2 NODE_RANK=0 HEAD=node0 recipes/launch/torchrun.sh recipes/qwen3-8xh200.toml --set plan.cluster=2x8xH200
#
# Nodes that come and go, as many as there are from 2 to 8: the run goes on from its last checkpoint with whoever is left
# when a node is lost, and with all when one joins. The head has to stay; leave plan.cluster out, or "auto".
#
#     NODES=2:8 HEAD=node0 recipes/launch/torchrun.sh recipes/qwen3-8xh200.toml
#
# All nodes need the same installation, and config, data and run.output at the same paths of a shared file system.
set -euo pipefail
: "${NODES:?how many nodes take part}" "${HEAD:?host name or address of node 0}"

# Plans change the sizes of buffers from step to step, which fragments fixed segments of GPU memory.
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"

if [[ "$NODES" == *:* ]]; then
    # A node that joins later waits for ever for an address that torchrun's shared store no longer announces.
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    rendezvous=(--rdzv-backend c10d --rdzv-id "${RUN_ID:-seqloom}" --max-restarts "${RESTARTS:-100}")
else
    # Static rendezvous: ranks are numbered by NODE_RANK, so the ranks of a node follow each other, as plans assume.
    rendezvous=(--rdzv-backend static --node-rank "${NODE_RANK:?the number of this node, from 0}")
fi
exec torchrun --nnodes "$NODES" --nproc-per-node "${RANKS_PER_NODE:-gpu}" "${rendezvous[@]}" \
    --rdzv-endpoint "$HEAD:${PORT:-29500}" -m seqloom train "$@"
