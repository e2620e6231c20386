"""A training loop of your own, on as many processes as you start:

torchrun --nproc-per-node 4 examples/own_loop.py
"""

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import seqloom as sl
from seqloom.dist import Communicators, TorchTransport, bind
from seqloom.integrations.transformers import attach, describe_model, head, hidden_states
from seqloom.models.loss import summed_loss
from seqloom.plan import GroupFamily

torch.manual_seed(0)  # the same weights on all ranks, as from_pretrained gives them
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
batches = [[torch.arange(n + step) % 64 for n in (400, 20, 90, 7)] for step in range(8)]  # documents of token ids
dist.init_process_group("gloo")  # nccl on GPUs
ranks = dist.get_world_size()

transport = TorchTransport(Communicators(GroupFamily(ranks, node_size=ranks)))
spec = describe_model(attach(model))
for documents in batches:
    total, lengths = torch.zeros(()), torch.tensor([len(each) for each in documents])
    ids, ends = torch.cat(documents), lengths.cumsum(0)
    labels = ids.roll(-1).index_fill(0, ends - 1, -100)  # the next token; none at the end of a document
    plan = sl.plan(lengths.tolist(), cluster=f"1x{ranks}xCPU", model=spec)
    for current in plan.pipelines[0].rounds:
        context = bind(current.by_stage[0], transport)  # which tokens this rank holds, and with whom it exchanges
        rows = (ends - lengths)[context.documents] + context.positions
        hidden = hidden_states(model, ids[rows], context.positions, context)
        weight, _, logits, bias = head(model)
        loss = summed_loss(hidden, weight, labels[rows], logits=logits, bias=bias) / int((labels != -100).sum())
        loss.backward()
        total += loss.detach()
    for tensor in (total, *(parameter.grad for parameter in model.parameters())):
        dist.all_reduce(tensor)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss {total:.5f}  {plan}")
dist.destroy_process_group()
