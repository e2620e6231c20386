"""Train a model whose tokens see their whole document to fill in masked tokens, on as many processes as you start:

torchrun --nproc-per-node 4 examples/denoising_loop.py
"""

from functools import partial

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import seqloom as sl
from seqloom.dist import Communicators, TorchTransport
from seqloom.engine import bind_plan, run_step
from seqloom.integrations.transformers import attach, describe_model, model_adapter
from seqloom.params import ReplicatedParameters
from seqloom.plan import GroupFamily

MASK = 63


def read(ids, labels, context):
    """Return the tokens and labels that this rank holds in a round."""
    held = [[each[document][start:stop] for document, start, stop in context.spans] for each in (ids, labels)]
    return tuple(torch.cat(each or [torch.empty(0, dtype=torch.int64)]) for each in held)


torch.manual_seed(0)  # the same weights on all ranks, as from_pretrained gives them
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, is_causal=False, **sizes))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
dist.init_process_group("gloo")  # nccl on GPUs
ranks = dist.get_world_size()

transport = TorchTransport(Communicators(GroupFamily(ranks, node_size=ranks)))
parameters = ReplicatedParameters(model_adapter(attach(model)), transport)
spec = describe_model(model)
draw = torch.Generator().manual_seed(0)  # the same documents, each of one token, and masks on all ranks
documents = [torch.randint(MASK, (1,), generator=draw).repeat(n) for n in (400, 90, 20, 33, 60, 7)]
for _ in range(8):
    masked = [torch.rand(len(each), generator=draw) < 0.3 for each in documents]
    ids = [each.masked_fill(hidden, MASK) for each, hidden in zip(documents, masked, strict=True)]
    labels = [each.masked_fill(~hidden, -100) for each, hidden in zip(documents, masked, strict=True)]
    plan = sl.plan([len(each) for each in documents], cluster=f"1x{ranks}xCPU", model=spec)
    valid = sum(int(each.sum()) for each in masked)
    result = run_step(bind_plan(plan, transport), parameters, partial(read, ids, labels), valid)
    optimizer.step()  # with the gradients of the whole step, which all ranks have now
    if dist.get_rank() == 0:
        print(f"loss {result.loss:.5f}  {plan}")
dist.destroy_process_group()
