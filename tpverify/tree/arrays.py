"""What every tree call accepts: numpy arrays, torch CPU tensors and plain sequences, checked once at the boundary."""

import operator
from typing import Any

import numpy as np

from tpverify.errors import ArgumentError

INT64_MAX = 2**63 - 1


def index(name: str, value: Any, low: int, high: int) -> int:
    """`value` as an int in [low, high]; anything that is not an integer, or outside, is an ArgumentError."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ArgumentError(name, f"an integer in {low}..{high}", repr(value)) from None
    if not low <= number <= high:
        raise ArgumentError(name, f"an integer in {low}..{high}", number)
    return number


def int_array(name: str, value: Any, ndim: int) -> np.ndarray:
    """`value` as a C-contiguous int64 array of `ndim` axes; floats and booleans are refused, not rounded."""
    if _is(value, np.int64, ndim):
        return value
    array = _numpy(name, value)
    if array.dtype.kind not in "iu":
        raise ArgumentError(name, "integers", array.dtype)
    if array.dtype == np.uint64 and array.size and int(array.max()) > INT64_MAX:
        raise ArgumentError(name, "integers that fit int64", int(array.max()))
    return _shaped(name, array, np.int64, ndim)


def float_array(name: str, value: Any, ndim: int, dtype: type) -> np.ndarray:
    """`value` as a C-contiguous float array of `ndim` axes, any float type converted to `dtype`."""
    if _is(value, dtype, ndim):
        return value
    array = _numpy(name, value)
    if array.dtype.kind != "f":
        raise ArgumentError(name, "floating point", array.dtype)
    return _shaped(name, array, dtype, ndim)


def _is(value: Any, dtype: type, ndim: int) -> bool:
    return type(value) is np.ndarray and value.dtype == dtype and value.ndim == ndim and value.flags.c_contiguous


def _numpy(name: str, value: Any) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "detach"):  # a torch tensor, without importing torch
        tensor = value.detach()
        if tensor.device.type != "cpu":
            raise ArgumentError(name, "a numpy array or a torch CPU tensor", f"a tensor on {tensor.device}")
        return (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
    try:
        return np.asarray(value)
    except (TypeError, ValueError, OverflowError):
        raise ArgumentError(name, "an array", type(value).__name__) from None


def _shaped(name: str, array: np.ndarray, dtype: type, ndim: int) -> np.ndarray:
    if array.ndim != ndim:
        raise ArgumentError(name, f"{ndim} axes", f"shape {array.shape}")
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes an infinity, which the caller judges
        return np.ascontiguousarray(array, dtype=dtype)
