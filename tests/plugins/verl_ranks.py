"""What two ranks of a data parallel group answer to the same calls; the first prints both answers."""

import json
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from seqloom.errors import SeqloomError
from seqloom.integrations.verl import rearrange_micro_batches
from support.verl_batches import batch_of

CAP = 1_024
CALLS = (((900, 900, 900), (5, 6, 7, 8)), ((900,) * 5, (5, 6)), ((5, CAP + 1), (5, 6)))
"""Lengths of the first and the second rank."""

dist.init_process_group("gloo")
said = []
for lengths in CALLS:
    try:
        batch = batch_of(lengths[dist.get_rank()], nested=True)
        said.append(len(rearrange_micro_batches(batch, CAP, dp_group=dist.group.WORLD)[1]))
    except SeqloomError as error:
        said.append(str(error))
answers = [None, None]
dist.all_gather_object(answers, said)
if dist.get_rank() == 0:
    print(json.dumps(answers))
dist.destroy_process_group()
