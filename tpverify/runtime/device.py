"""Where ranks run: on GPUs where each can have one and the kernel takes the work, else on CPUs, and why."""

import math
import os
import time
from typing import Any, NamedTuple

import ray

from tpverify.config import MlaGeometry
from tpverify.errors import ArgumentError, ClusterError

GIB = 1 << 30
STEPS_SHARE = 64  # one part in so many of a GPU's memory is no pool's: graphs, and what a step allocates, come after it
FREED_S = 5.0  # a GPU's memory is free again a moment after the process that had it
VECTOR = 8  # bfloat16 that kernels read at once
Refusal = tuple[str, str, Any, bool]  # argument, what is expected, what came, and whether that is refused


class Place(NamedTuple):
    """device: "cpu" or "cuda". gpus: a rank's share, as Ray counts. nccl: whether ranks gather by NCCL: several with a
    GPU each, for it refuses two on one. reason: why "auto" did not take GPUs, or ""."""

    device: str
    gpus: float
    nccl: bool = False
    reason: str = ""


def for_attention(device: str, dtype: str, geometry: MlaGeometry, tp: int) -> tuple[str, str]:
    """`device` for verify attention in `dtype`; "cpu", with the reason, for "auto" if the kernel does not take it.

    Raises ArgumentError if the device is "cuda" all the same.
    """
    return _for_kernel(device, geometry, tp, [("dtype", "bfloat16", dtype, dtype != "bfloat16")])


def for_decoder(device: str, geometry: MlaGeometry, v_head_dim: int, tp: int) -> tuple[str, str]:
    """The same for a model of that geometry, whose ranks take the heads in virtual shards. Raises ArgumentError."""
    if device == "cpu":
        return device, ""
    from tpverify.model.gpu_decoder import virtual_shards
    from tpverify.ops.attention import KV_LORA_RANK, ROW_DIM

    shards = virtual_shards(geometry.num_heads)
    widths = geometry.kv_lora_rank, geometry.row_dim - geometry.kv_lora_rank
    expected = KV_LORA_RANK, ROW_DIM - KV_LORA_RANK
    values = geometry.num_heads // shards * v_head_dim
    refusals = [
        ("model", "kv_lora_rank {} and qk_rope_head_dim {}".format(*expected), widths, widths != expected),
        ("model", f"a multiple of {VECTOR} values a shard of heads", values, values % VECTOR != 0),
        ("tp", f"a divisor of {shards} shards of heads", tp, shards % tp != 0),
    ]
    return _for_kernel(device, geometry, tp, refusals)


def _for_kernel(device: str, geometry: MlaGeometry, tp: int, refusals: list[Refusal]) -> tuple[str, str]:
    """After the caller's own refusals, those of the kernel for any work."""
    if device == "cpu":
        return device, ""
    import torch  # ranks import this module too, and not all of them need it

    from tpverify.ops import cuda

    library, heads = cuda.library(), geometry.num_heads // tp
    others = None if isinstance(library, str) else cuda.other_gpus()
    kinds = " or ".join(f"{major}.{minor}" for major, minor in cuda.archs()) if others else ""
    refusals = [
        *refusals,
        ("tp", f"at most {cuda.MAX_HEADS} heads a rank", f"{heads}", heads > cuda.MAX_HEADS),
        ("device", "an installation with CUDA kernels", library, isinstance(library, str)),
        ("device", "a torch built with CUDA", torch.__version__, torch.version.cuda is None),
        ("device", f"GPUs of compute capability {kinds}", others, others is not None),
    ]
    for argument, expected, got, refused in refusals:
        if refused:
            if device == "cuda":
                raise ArgumentError(argument, f"{expected} on device 'cuda'", got)
            return "cpu", f"{argument}: the kernel needs {expected}, got {got}"
    return device, ""


def choose(size: int, device: str, oversubscribe: bool, gpus: int) -> Place:
    """A place for `size` ranks on a node with so many GPUs. Raises ClusterError if GPUs are asked for without NCCL."""
    if device == "cpu":
        return Place("cpu", 0)
    if device == "auto" and gpus < (1 if oversubscribe else size):
        return Place("cpu", 0, reason=f"{size} ranks, {gpus} GPUs on the driver's node")
    if gpus < size and oversubscribe and gpus:
        ranks_each = -(-size // gpus)
        return Place("cuda", math.floor(1e4 / ranks_each) / 1e4)  # Ray counts in ten-thousandths
    if size > 1 and gpus >= size and (missing := _nccl_missing()):
        if device == "cuda":
            raise ClusterError(missing)
        return Place("cpu", 0, reason=missing)
    return Place("cuda", 1, nccl=size > 1)


def _nccl_missing() -> str | None:
    from tpverify import pynccl

    return pynccl.why_not()


def own_gpu() -> str:
    """The GPU that Ray gave to this actor, as torch calls it here. Raises ClusterError unless it is a single one."""
    assigned = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    if len(assigned) != 1:
        several = f"GPUs {', '.join(assigned)}: does a runtime_env set CUDA_VISIBLE_DEVICES?"
        raise ClusterError(f"expected one GPU from Ray for each rank, got {several}")
    return f"cuda:{gpu_index(assigned[0], os.environ.get('CUDA_VISIBLE_DEVICES'))}"


def gpu_index(assigned: str, visible: str | None) -> int:
    """The number of GPU `assigned` among those that CUDA_VISIBLE_DEVICES lets this process see.

    Ray leaves an actor with its own alone, unless RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES tells it not to.
    """
    return visible.split(",").index(assigned) if visible else int(assigned)


def latent_pool(layers: int, num_slots: int, row_dim: int, dtype: Any, device: Any, beside: int = 0) -> Any:
    """A pool [layers, num_slots, row_dim] of zeros. beside: bytes a slot that whoever asks will need for other rows.
    Raises ArgumentError if the GPU has too little memory free."""
    import torch

    require_room(layers, num_slots, row_dim, dtype, device, beside)
    return torch.zeros(layers, num_slots, row_dim, dtype=dtype, device=device)


def require_room(layers: int, num_slots: int, row_dim: int, dtype: Any, device: Any, beside: int = 0) -> None:
    """Wait a moment for memory of a GPU that somebody gives back, then raise ArgumentError if a pool does not fit."""
    import torch

    if device.type != "cuda":
        return
    torch.cuda.empty_cache()  # what an earlier worker of this process had
    row_bytes = row_dim * dtype.itemsize
    needed = num_slots * (layers * row_bytes + beside)
    free, total = torch.cuda.mem_get_info(device)
    end = time.monotonic() + FREED_S
    while _room(free, total) < needed <= total and time.monotonic() < end:
        time.sleep(0.05)
        free, _ = torch.cuda.mem_get_info(device)
    check_room(layers, num_slots, row_bytes, free, total, beside)


def check_room(layers: int, num_slots: int, row_bytes: int, free: int, total: int, beside: int = 0) -> None:
    """Raise ArgumentError unless a pool, what is beside it and a step fit into `free` of a GPU's `total` bytes."""
    slot_bytes, room = layers * row_bytes + beside, _room(free, total)
    needed = num_slots * slot_bytes
    if needed > room:
        most = f"a pool of at most {room / GIB:.2f} GiB, free of the GPU's {total / GIB:.2f}"
        fit, got = room // slot_bytes, f"{num_slots} slots, {needed / GIB:.2f} GiB"
        raise ArgumentError("num_slots", f"{most}: {fit} slots", got)


def _room(free: int, total: int) -> int:
    return max(free - total // STEPS_SHARE, 0)
