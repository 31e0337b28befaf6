"""Tensors as raw frames and back.

numpy copies what has to be copied: torch would share a megabyte out among all its threads, and these have gone to sleep
since the step before.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor


def frame_of(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor in row-major order; no copy if it is contiguous."""
    tensor = tensor.detach()
    if not tensor.is_contiguous() and tensor.stride(-1) == 1:  # numpy has no bfloat16, but it has bytes
        return np.ascontiguousarray(tensor.view(torch.uint8).numpy()).reshape(-1).data
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def digest_of(tensor: Tensor) -> str:
    """16 hex digits of the bytes of a CPU tensor."""
    return blake2b(frame_of(tensor), digest_size=8).hexdigest()


def tensor_of(
    frame: bytes | bytearray | memoryview, dtype: torch.dtype, shape: Sequence[int], pinned: bool = False
) -> Tensor:
    """A new CPU tensor with the bytes of `frame`. Raises ValueError unless they fill the shape exactly.

    pinned: in memory from which a GPU copies by itself.
    """
    tensor = torch.empty(*shape, dtype=dtype, pin_memory=pinned)
    view = frame_of(tensor)
    if len(frame) != len(view):
        raise ValueError(f"frame: expected {len(view)} bytes for {dtype} {tuple(shape)}, got {len(frame)}")
    view[:] = frame
    return tensor
