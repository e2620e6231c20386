"""NCCL's rules, enforced: what passes here does not hang or corrupt data on real GPUs.

On top of what every transport asks (one order of verbs per block, equal sizes and dtypes, contiguous tensors):

- A received tensor can be read after `wait`, not before: until then it holds NaN (integers: the largest).
- A sent tensor must not be written before `wait`.
- Every handle is waited for.
- A call returns when all its other sides have been called. On GPUs any call may do that to the host: NCCL connects two
  ranks at their first message, and a kernel's first launch or an allocation drains the device, which is busy until the
  peers of its messages have called. So the calls of all ranks need one order in which each only waits for earlier ones:
  two ranks that first send to each other and then receive, in two exchanges, deadlock.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from seqloom.dist.message_matching import MessageMatcher, Operation, Side
from seqloom.errors import SeqloomError


class StrictMessageMatcher(MessageMatcher):
    """Operations of all ranks under NCCL's rules."""

    blocks = True
    advice = "sends that cross must be in one exchange, and all ranks of a communicator need one order of operations"

    def __init__(self, ranks: int) -> None:
        """Start without any operation."""
        super().__init__(ranks)
        self._sent: dict[Operation, dict[Side, torch.Tensor]] = {}  # copies, of operations not waited for
        self._arrived: defaultdict[Operation, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)

    def start(self, operation: Operation) -> None:
        """Copy what is sent, and spoil what will be received."""
        self._sent[operation] = {side: side.tensor.clone() for side in operation.sides if side.sends}
        for side in operation.sides:
            if not side.sends:
                _poison(side.tensor)
        super().start(operation)

    def deliver(self, send: Side, receive: Side) -> None:
        """Keep the tensor until the receiver waits for it."""
        self._arrived[receive.operation].append((receive.tensor, self._sent[send.operation][send]))

    def wait(self, operation: Operation) -> None:
        """Return when the operation is done and its tensors are received; waiting twice is fine."""
        super().wait(operation)
        with self.lock:
            sent, received = self._sent.pop(operation, {}), self._arrived.pop(operation, ())
        for side, copy in sent.items():
            if not torch.equal(_bits(side.tensor), _bits(copy)):
                error = SeqloomError(
                    f"rank {operation.rank} {operation} {side}, and the tensor was written before wait(); "
                    "write to what is being sent after wait()"
                )
                with self.lock:
                    self.refuse(error, operation.rank)
        for tensor, arrived in received:
            tensor.copy_(arrived)

    def leave(self, rank: int) -> None:
        """Note that the body of `rank` has returned; it must have waited for every handle."""
        with self.lock:
            left = next((operation for operation in self._sent if operation.rank == rank), None)
        if left is not None:
            raise SeqloomError(f"rank {rank} ended without wait() for {left}; call wait() on every handle")
        super().leave(rank)


def _poison(tensor: torch.Tensor) -> None:
    """Fill with a value that a reader notices."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a flat tensor: a NaN is equal to itself."""
    return tensor.view(torch.uint8)
