"""Train on rewards with TRL's `GRPOTrainer` under plans, on as many processes as you start:

torchrun --nproc-per-node 2 examples/trl_grpo.py
"""

import os

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

from seqloom.integrations.trl import SeqloomGRPOTrainer


def reward(completions, **_):
    """Prefer letters."""
    return [sum(letter.isalpha() for letter in text) / 24 for text in completions]


folder = "recipes/models/tiny-llama"
torch.manual_seed(0)  # the same weights on all ranks, as from_pretrained gives them
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
settings = GRPOConfig(
    "run",
    num_generations=4,
    max_completion_length=24,
    per_device_train_batch_size=16 // int(os.environ.get("WORLD_SIZE", "1")),  # 4 prompts in a step
    max_steps=4,
    learning_rate=2e-2,
    logging_steps=1,
    report_to=[],
    use_cpu=True,
    bf16=False,
)
trainer = SeqloomGRPOTrainer(
    model,
    reward,
    args=settings,
    train_dataset=Dataset.from_dict({"prompt": ["One", "Two", "Three", "Four"] * 4}),
    processing_class=AutoTokenizer.from_pretrained(folder),
)
trainer.train()
if trainer.is_world_process_zero():
    print("reward", *(f"{entry['reward']:.4f}" for entry in trainer.state.log_history if "reward" in entry))
