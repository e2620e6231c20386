"""A training loop with accelerate whose steps run under plans, on as many processes as you start:

torchrun --nproc-per-node 2 examples/accelerate_loop.py
"""

import random

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, DataCollatorWithFlattening

from seqloom.integrations.transformers.planned_steps import PlannedSteps, whole_batches

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)  # the same weights on all ranks, as from_pretrained gives them
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("recipes/models/tiny-llama"))
model = accelerator.prepare_model(model, evaluation_mode=True)  # on its device, without DistributedDataParallel
steps = PlannedSteps(model)
draw = random.Random(0)
lengths = [min(400, int(8 * draw.paretovariate(0.7))) for _ in range(48)]  # most are short, a few are long
documents = [{"input_ids": [draw.randrange(256)] * length} for length in lengths]
shuffled = {"shuffle": True, "generator": torch.Generator().manual_seed(0)}
loader = DataLoader(documents, batch_size=8, collate_fn=DataCollatorWithFlattening(), **shuffled)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
optimizer, loader = accelerator.prepare(optimizer, loader)

for batch in whole_batches(loader):  # the 8 documents of a step, on every rank
    loss = steps.backward(batch).loss  # plan, forward, backward: gradients of the whole batch, on every rank
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    accelerator.print(f"loss {loss:.4f}")
accelerator.save_state("state")  # load_state("state") goes on, on any number of ranks
accelerator.end_training()
