"""Train on preferences with TRL's `DPOTrainer` under plans, on as many processes as you start:

torchrun --nproc-per-node 2 examples/trl_dpo.py
"""

import os
import random

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig

from seqloom.integrations.trl import SeqloomDPOTrainer

folder = "recipes/models/tiny-llama"
torch.manual_seed(0)  # the same weights on all ranks, as from_pretrained gives them
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
draw = random.Random(0)
words = [[min(60, int(draw.paretovariate(0.6))) for _ in range(32)] for _ in range(2)]  # very unequal completions
pairs = [{"prompt": "Well?", "chosen": " yes" * m, "rejected": " no" * n} for m, n in zip(*words, strict=True)]
settings = DPOConfig(
    "run",
    per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", "1")),  # 8 pairs in a step
    max_steps=4,
    learning_rate=2e-2,
    logging_steps=1,
    report_to=[],
    use_cpu=True,
    bf16=False,
)
trainer = SeqloomDPOTrainer(  # the reference is the model without its adapters
    model,
    args=settings,
    train_dataset=Dataset.from_list(pairs),
    processing_class=AutoTokenizer.from_pretrained(folder),
    peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
if trainer.is_world_process_zero():
    print("loss", *(f"{entry['loss']:.4f}" for entry in trainer.state.log_history if "loss" in entry))
