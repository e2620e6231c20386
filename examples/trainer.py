"""Train with `transformers.Trainer` under plans, on as many processes as you start:

torchrun --nproc-per-node 2 examples/trainer.py
"""

import os
import random

import torch
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments

from seqloom.integrations.transformers.trainer import SeqloomTrainer

torch.manual_seed(0)  # the same weights on all ranks, as from_pretrained gives them
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("recipes/models/tiny-llama"))
draw = random.Random(0)
lengths = [min(400, int(8 * draw.paretovariate(0.7))) for _ in range(64)]  # most are short, a few are long
documents = [{"input_ids": [draw.randrange(256)] * length} for length in lengths]
settings = TrainingArguments(
    "run",
    per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", "1")),  # 8 documents in a step
    max_steps=6,
    learning_rate=3e-3,
    logging_steps=1,
    report_to=[],
    use_cpu=True,
)
trainer = SeqloomTrainer(model, settings, train_dataset=documents)  # sharding="full": parameters over all ranks
trainer.train()
if trainer.is_world_process_zero():
    print("loss", *(f"{entry['loss']:.4f}" for entry in trainer.state.log_history if "loss" in entry))
