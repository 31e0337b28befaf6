"""What every tree call accepts: numpy arrays, torch CPU tensors and plain sequences, checked once at the boundary."""

from typing import Any

import numpy as np

from tpverify.errors import ArgumentError, describe

INT64_MAX = 2**63 - 1


def int_array(name: str, value: Any, ndim: int) -> np.ndarray:
    """`value` as a C-contiguous int64 array of `ndim` axes; floats and booleans are refused, not rounded."""
    if _is(value, np.int64, ndim):
        return value
    array = as_numpy(name, value)
    if array.dtype.kind not in "iu":
        raise ArgumentError(name, "integers", array.dtype)
    if array.dtype == np.uint64 and array.size and int(array.max()) > INT64_MAX:
        raise ArgumentError(name, "integers that fit int64", int(array.max()))
    return _shaped(name, array, np.int64, ndim)


def float_array(name: str, value: Any, ndim: int, dtype: type) -> np.ndarray:
    """`value` as a C-contiguous float array of `ndim` axes, any float type converted to `dtype`."""
    if _is(value, dtype, ndim):
        return value
    array = as_numpy(name, value)
    if array.dtype.kind != "f":
        raise ArgumentError(name, "floating point", array.dtype)
    return _shaped(name, array, dtype, ndim)


def _is(value: Any, dtype: type, ndim: int) -> bool:
    return type(value) is np.ndarray and value.dtype == dtype and value.ndim == ndim and value.flags.c_contiguous


def as_numpy(name: str, value: Any) -> np.ndarray:
    """`value` as an array of whatever type and shape it has; no copy if it is one already."""
    if isinstance(value, np.ndarray):
        return value
    try:
        if not hasattr(value, "detach"):
            return np.asarray(value)
        tensor = value.detach()  # a torch tensor, without importing torch
        return (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
    except (TypeError, ValueError, OverflowError, RuntimeError):  # ragged lists; tensors that are not dense or on a GPU
        raise ArgumentError(name, "a numpy array, a dense torch CPU tensor or numbers", describe(value)) from None


def _shaped(name: str, array: np.ndarray, dtype: type, ndim: int) -> np.ndarray:
    if array.ndim != ndim:
        raise ArgumentError(name, f"{ndim} axes", f"shape {array.shape}")
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes an infinity, which the caller judges
        return np.ascontiguousarray(array, dtype=dtype)
