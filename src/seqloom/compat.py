"""Private operators and names of torch, each behind a typed function, and a check that torch has not changed them.

Everything else in Seqloom calls torch through its public names. Layouts of tensors are the operators' own.
"""

from __future__ import annotations

import math
import mmap
import re
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from seqloom.errors import SeqloomError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# The signatures these functions are written for (torch 2.11 to 2.13). Arguments that torch adds behind these, by
# keyword and with a default, do no harm.
SCHEMAS = (
    "aten::_scaled_dot_product_flash_attention_for_cpu(Tensor query, Tensor key, Tensor value, float dropout_p=0., "
    "bool is_causal=False, *, Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward(Tensor grad_out, Tensor query, Tensor key, "
    "Tensor value, Tensor out, Tensor logsumexp, float dropout_p, bool is_causal, *, Tensor? attn_mask=None, "
    "float? scale=None) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)",
    "aten::_flash_attention_forward(Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, Tensor? cum_seq_k, "
    "SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, bool return_debug_mask, *, float? scale=None, "
    "SymInt? window_size_left=None, SymInt? window_size_right=None) -> (Tensor output, "
    "Tensor softmax_logsumexp, Tensor rng_state, Tensor unused, Tensor debug_attn_mask)",
    "aten::_flash_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
    "Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, "
    "bool is_causal, Tensor rng_state, Tensor unused, *, float? scale=None, SymInt? window_size_left=None, "
    "SymInt? window_size_right=None) -> (Tensor, Tensor, Tensor)",
    "aten::_scaled_mm(Tensor self, Tensor mat2, Tensor scale_a, Tensor scale_b, Tensor? bias=None, "
    "Tensor? scale_result=None, ScalarType? out_dtype=None, bool use_fast_accum=False) -> Tensor",
)


Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of queries, keys and values."""


def cpu_flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run flash attention on a CPU and return (out, lse).

    Args:
        q, out: [batch, heads, queries, dim]; lse: [batch, heads, queries], float32 or float64.
        k, v: [batch, kv_heads, keys, dim].
        causal: query a sees key b when b <= a, also where there are more keys than queries, or fewer.
        mask: [queries, keys], added to the logits; float32, or the dtype of q. A row that sees nothing returns
            zeros, and 0 as its lse.
    """
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return operator(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)


def cpu_flash_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool,
    mask: torch.Tensor | None,
    scale: float,
) -> Gradients:
    """Run the backward of `cpu_flash_forward`. In half precision it adds up dk and dv in half precision."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return operator(dout, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale)


class VarlenArguments(NamedTuple):
    """Arguments of flash attention over packed sequences, by the names of flash-attn."""

    cu_seqlens_q: torch.Tensor  # int32[n + 1] on the device, where sequences begin
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int  # longest sequence
    max_seqlen_k: int
    softmax_scale: float
    causal: bool  # the last query of a sequence sees all its keys, the one before all but the last, and so on
    window_size_left: int  # keys seen before and after a query; -1: all
    window_size_right: int


def flash_mask(causal: bool, window: int | None) -> tuple[bool, int, int]:
    """Return (causal, window_size_left, window_size_right) for a window in tokens, the query itself included."""
    if window is None:
        return causal, -1, 0 if causal else -1
    return False, window - 1, 0


def flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: VarlenArguments
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run torch's flash attention over packed sequences on a GPU and return (out, lse).

    Args:
        q, out: [queries, heads, dim]; lse: [heads, queries], float32.
        k, v: [keys, kv_heads, dim].
    """
    *lengths, scale, causal, left, right = arguments
    windows = {"window_size_left": left, "window_size_right": right}
    operator = torch.ops.aten._flash_attention_forward
    return operator(q, k, v, *lengths, 0.0, causal, False, scale=scale, **windows)[:2]


def flash_backward(dout: torch.Tensor, saved: tuple[torch.Tensor, ...], arguments: VarlenArguments) -> Gradients:
    """Run the backward of `flash_forward`; `saved` is q, k, v, out and lse."""
    *lengths, scale, causal, left, right = arguments
    windows = {"window_size_left": left, "window_size_right": right}
    operator, device = torch.ops.aten._flash_attention_backward, dout.device
    rng_state, unused = torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)
    return operator(dout, *saved, *lengths, 0.0, causal, rng_state, unused, scale=scale, **windows)


def scaled_product(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Multiply float8 matrices on a GPU: (a * a_scale) (b * b_scale), in bfloat16.

    Args:
        a: [m, k], rows contiguous; a_scale: float32[m, 1].
        b: [k, n], columns contiguous; b_scale: float32[1, n].
        dtype: of the result. Tensor cores add up in somewhat less than float32, twice as fast as in all of it.
    """
    return torch._scaled_mm(a, b, a_scale, b_scale, out_dtype=torch.bfloat16, use_fast_accum=True).to(dtype)


def check_operators(expected: Iterable[str] = SCHEMAS) -> None:
    """Compare torch's operators with the signatures that this file is written for.

    Raises:
        SeqloomError: naming every operator that is gone or changed, with both signatures.
    """
    wrong = []
    for schema in expected:
        name = schema.partition("(")[0]
        operator = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
        if operator is None:
            wrong.append(f"{name} is gone")
        elif not _serves(str(operator.default._schema), schema):
            wrong.append(f"expected {schema}\n       got {operator.default._schema}")
    if wrong:
        changes = "\n  ".join(wrong)
        raise SeqloomError(
            f"torch {torch.__version__} has changed private operators that Seqloom calls; "
            f"install torch 2.11 to 2.13, or adapt seqloom/compat.py:\n  {changes}"
        )


def _serves(found: str, expected: str) -> bool:
    """Return whether calls written for `expected` mean the same to `found`: equal, but for added keyword defaults."""
    arguments, _, returns = expected.rpartition(") -> ")
    now, _, returns_now = found.rpartition(") -> ")
    added = now.removeprefix(arguments).split(", ")
    return now.startswith(arguments) and returns_now == returns and added[0] == "" and all("=" in a for a in added[1:])


def mark_dynamic(tensor: torch.Tensor, axis: int) -> None:
    """Tell torch.compile that the length of an axis will change, so that a graph should not depend on it."""
    from torch._dynamo import maybe_mark_dynamic  # loads the compiler; only when it is needed

    maybe_mark_dynamic(tensor, axis)


def inductor_options(wanted: Mapping[str, bool]) -> dict[str, Any]:
    """Return those options of torch.compile that this version of torch has."""
    from torch._inductor import list_options

    known = list_options()
    return {name: value for name, value in wanted.items() if name in known}


def occupy_gpu(cycles: int) -> None:
    """Keep the current GPU busy for `cycles` clock cycles, about half a nanosecond each, without blocking the host."""
    torch.cuda._sleep(cycles)


def inherit_timeout(group: dist.ProcessGroup) -> None:
    """Give a process group the timeout of the default group; torch gives every new one its own default."""
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    world = dist.group.WORLD
    assert world is not None  # there is a group, so there is a job
    _set_pg_timeout(world._get_backend(device).options._timeout, group)


def dtensor_like(like: DTensor, local: torch.Tensor) -> DTensor:
    """Return a DTensor with the mesh and placements of `like` and this shard; ten times faster than from_local.

    The shard may have another dtype, and be in host memory where those of `like` are on a GPU.
    """
    spec, meta = like._spec, like._spec.tensor_meta
    if meta is not None and meta.dtype != local.dtype:
        spec = replace(spec, tensor_meta=meta._replace(dtype=local.dtype))
    return type(like)(local, spec, requires_grad=False)


def newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """Return the orthogonal matrix nearest to a matrix, about, in bfloat16, as torch's Muon computes it."""
    from torch.optim import _muon

    coefficients = (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C)
    return _muon._zeropower_via_newtonschulz(matrix, coefficients, _muon.DEFAULT_NS_STEPS, _muon.EPS)


def shard_offset(tensor: DTensor) -> tuple[int, ...]:
    """Return where this rank's shard begins in a DTensor, axis by axis."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1]


def pinned_empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Allocate pinned host memory: exactly so much, unlike torch's own allocator.

    It has pages of its own, since CUDA pins whole ones, and gives them back when the last tensor of it is gone: what is
    allocated at that address afterwards could otherwise neither be pinned nor copied.
    """
    elements = math.prod(shape)
    if not elements:
        return torch.empty(shape, dtype=dtype)
    pages = mmap.mmap(-1, elements * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(pages, dtype=dtype).view(shape)  # its storage holds the pages
    runtime: Any = torch.cuda.cudart()
    error = runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
    if int(error):
        raise SeqloomError(
            f"{tensor.nbytes / 2**30:.2f} GiB of host memory cannot be pinned (CUDA error {int(error)}); set "
            "optimiser.offload = false, allow more locked memory (ulimit -l), or use more nodes"
        )
    unpin = weakref.finalize(pages, runtime.cudaHostUnregister, tensor.data_ptr())
    unpin.atexit = False  # pyrefly: ignore[missing-attribute] - the process gives all of it back
    return tensor


def lost_rank_reason(error: BaseException) -> str | None:
    """Return what torch says of a rank that is gone or late, in a sentence; None: the error is another one.

    The store and NCCL have error types. gloo raises RuntimeError with the position in its source, and so do two verbs
    of NCCL (an all-to-all, a send) with the number of ncclSystemError or ncclRemoteError.
    """
    text = str(error).strip()
    untyped = isinstance(error, RuntimeError) and re.match(r"\[\S*/gloo/\S*:\d+\] |NCCL Error [26]: ", text)
    if not untyped and not isinstance(error, dist.DistError):
        return None
    line = next(iter(text.splitlines()), type(error).__name__).removesuffix(":")
    return re.sub(r"^\[\S+:\d+\] ", "", line).partition(". ")[0]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch could not allocate a tensor, on a GPU or in host memory, for which it has no error type."""
    on_host = isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
    return on_host or isinstance(error, torch.OutOfMemoryError | MemoryError)
