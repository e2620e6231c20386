"""Fine-tune adapters on chats with TRL's `SFTTrainer` under plans, packed, on as many processes as you start:

torchrun --nproc-per-node 2 examples/trl_sft.py
"""

import os
import random

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig

from seqloom.integrations.trl import SeqloomSFTTrainer

folder = "recipes/models/tiny-llama"
torch.manual_seed(0)  # the same weights on all ranks, as from_pretrained gives them
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
draw = random.Random(0)
words = [min(60, int(draw.paretovariate(0.7))) for _ in range(64)]  # most answers are short, a few are long
chats = [[{"role": "user", "content": "Go on!"}, {"role": "assistant", "content": "and on " * n}] for n in words]
settings = SFTConfig(
    "run",
    packing=True,
    max_length=512,
    per_device_train_batch_size=4 // int(os.environ.get("WORLD_SIZE", "1")),  # 4 packed rows in a step
    max_steps=4,
    learning_rate=2e-2,
    logging_steps=1,
    report_to=[],
    use_cpu=True,
    bf16=False,
)
trainer = SeqloomSFTTrainer(
    model,
    args=settings,
    train_dataset=Dataset.from_dict({"messages": chats}),
    processing_class=AutoTokenizer.from_pretrained(folder),
    peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
if trainer.is_world_process_zero():
    print("loss", *(f"{entry['loss']:.4f}" for entry in trainer.state.log_history if "loss" in entry))
