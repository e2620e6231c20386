"""Batches as verl has them."""

from collections.abc import Sequence
from typing import Any

import torch


def batch_of(lengths: Sequence[int], nested: bool) -> Any:
    """Return a TensorDict whose samples begin with their number."""
    from tensordict import TensorDict

    rows = [torch.cat([torch.tensor([number]), torch.arange(length - 1)]) for number, length in enumerate(lengths)]
    if nested:
        return TensorDict({"input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, [len(rows)])
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
    return TensorDict({"input_ids": ids, "attention_mask": mask.long()}, [len(rows)])
