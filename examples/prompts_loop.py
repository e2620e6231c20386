"""Train a prefix language model, whose prompts see themselves, on as many processes as you start:

torchrun --nproc-per-node 4 examples/prompts_loop.py
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


def read(ids, labels, context):
    """Return the tokens and labels that this rank holds in a round."""
    held = [[each[document][start:stop] for document, start, stop in context.spans] for each in (ids, labels)]
    return tuple(torch.cat(each or [torch.empty(0, dtype=torch.int64)]) for each in held)


torch.manual_seed(0)  # the same weights on all ranks, as from_pretrained gives them
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
dist.init_process_group("gloo")  # nccl on GPUs
ranks = dist.get_world_size()

transport = TorchTransport(Communicators(GroupFamily(ranks, node_size=ranks)))
parameters = ReplicatedParameters(model_adapter(attach(model)), transport)
spec = describe_model(model)
draw = torch.Generator().manual_seed(0)  # the same documents on all ranks: a prompt, and its last token as the answer
prompts = [torch.randint(64, (n,), generator=draw) for n in (300, 70, 15, 25, 50, 5)]
ids = [torch.cat([prompt, prompt[-1:].repeat(len(prompt) // 2)]) for prompt in prompts]
labels = [each.roll(-1).index_fill(0, torch.tensor([-1]), -100) for each in ids]
for label, prompt in zip(labels, prompts, strict=True):
    label[: len(prompt) - 1] = -100  # a token of the prompt has seen the next one
prefixes = {number: len(prompt) for number, prompt in enumerate(prompts)}
valid = sum(int((each != -100).sum()) for each in labels)
for _ in range(8):
    plan = sl.plan([len(each) for each in ids], cluster=f"1x{ranks}xCPU", model=spec)
    result = run_step(bind_plan(plan, transport, prefixes=prefixes), parameters, partial(read, ids, labels), valid)
    optimizer.step()  # with the gradients of the whole step, which all ranks have now
    if dist.get_rank() == 0:
        print(f"loss {result.loss:.5f}  {plan}")
dist.destroy_process_group()
