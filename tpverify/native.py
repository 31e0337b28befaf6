"""Finds and loads the native libraries, and mirrors the host library's structs (tpverify.h, host/replay.h,
host/tables.h).

The host library is optional: without it the Python twins of the tree functions and of the slot tables' run, with the
same results, and the products of torch in place of the CPU's layers. Two environment variables, read at the first use:

TPVERIFY_NATIVE   0: never load it, the twins run. 1: it must be there, else ArgumentError. Unset: used if found.
TPVERIFY_LIB_DIR  the folder to search in place of the installed package.
"""

import ctypes
import functools
import json
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tpverify.errors import ArgumentError

ABI_VERSION = 2
HOST_LIBRARY = "libtpverify_host.so"
PANEL = 16  # TPV_PANEL

_i32, _i64, _u64, _ptr = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p
_f32, _f64 = ctypes.c_float, ctypes.c_double


class DdtreeParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", _u64), ("depth", _i32), ("k", _i32), ("budget", _i32), ("num_nodes", _i32), ("exact", _i32),
        ("reserved", _i32), ("vocab_size", _i64), ("root_token", _i64), ("logprobs", _ptr), ("token_ids", _ptr),
        ("tokens", _ptr), ("parents", _ptr), ("depths", _ptr), ("first_child", _ptr), ("next_sibling", _ptr),
        ("ancestor_words", _ptr),
    ]  # fmt: skip


class AncestryParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", _u64), ("nodes", _i32), ("reserved", _i32), ("parents", ctypes.c_char_p), ("depths", _ptr),
        ("ancestor_words", _ptr),
    ]  # fmt: skip


class Tree(ctypes.Structure):
    _fields_ = [
        ("tokens", _ptr), ("first_child", _ptr), ("next_sibling", _ptr), ("num_nodes", _i32), ("reserved", _i32),
    ]  # fmt: skip


class AcceptGreedyParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", _u64), ("tree", Tree), ("target_tokens", _ptr), ("path", _ptr), ("path_length", _i32),
        ("reserved", _i32), ("bonus", _i64),
    ]  # fmt: skip


class AcceptSampledParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", _u64), ("tree", Tree), ("vocab_size", _i64), ("target_probs", _ptr), ("coins", _ptr),
        ("final_coin", _f64), ("threshold_single", _f64), ("threshold_acc", _f64), ("path", _ptr),
        ("path_length", _i32), ("reserved", _i32), ("bonus", _i64),
    ]  # fmt: skip


class AttentionParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", _u64), ("nodes", _i32), ("heads", _i32), ("rank", _i32), ("row_dim", _i32), ("threads", _i32),
        ("reserved", _i32), ("prefix", _i64), ("slots", _i64), ("pool_stride", _i64), ("q", _ptr), ("kv_pool", _ptr),
        ("prefix_slots", _ptr), ("tree_slots", _ptr), ("depths", _ptr), ("ancestor_words", _ptr), ("out", _ptr),
        ("lse", _ptr),
    ]  # fmt: skip


class LinearParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", _u64), ("rows", _i64), ("inputs", _i32), ("outputs", _i32), ("heads", _i32), ("reserved", _i32),
        ("x_stride_row", _i64), ("x_stride_head", _i64), ("y_stride_row", _i64), ("y_stride_head", _i64), ("x", _ptr),
        ("weight", _ptr), ("add", _ptr), ("y", _ptr),
    ]  # fmt: skip


class RmsNormParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", _u64), ("rows", _i64), ("columns", _i32), ("eps", _f32), ("x_stride_row", _i64),
        ("y_stride_row", _i64), ("x", _ptr), ("weight", _ptr), ("y", _ptr),
    ]  # fmt: skip


class RopeParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", _u64), ("rows", _i64), ("heads", _i32), ("dim", _i32), ("interleaved", _i32),
        ("reserved", _i32), ("x_stride_row", _i64), ("x_stride_head", _i64), ("y_stride_row", _i64),
        ("y_stride_head", _i64), ("x", _ptr), ("cos", _ptr), ("sin", _ptr), ("y", _ptr),
    ]  # fmt: skip


class SiluMulParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", _u64), ("rows", _i64), ("columns", _i32), ("reserved", _i32), ("x", _ptr), ("y", _ptr),
    ]  # fmt: skip


class PlaceParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", _u64), ("rows", _i64), ("columns", _i32), ("scale", _f32), ("places", _i64),
        ("x_stride_row", _i64), ("y_stride_row", _i64), ("x", _ptr), ("at", _ptr), ("y", _ptr),
    ]  # fmt: skip


class TablesParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", _u64), ("num_slots", _i64), ("states", _ptr), ("readers", _ptr), ("positions", _ptr),
        ("owners", _ptr), ("generations", _ptr), ("slot_keys", _ptr), ("position_keys", _ptr), ("limit", _i64),
        ("generation", _i64), ("seq", _i64), ("length", _i64), ("nodes", _i64), ("accepted", _i64), ("tree", _ptr),
        ("path", _ptr), ("settled", _ptr), ("prefix_sum", _u64), ("tree_sum", _u64), ("hash", _u64),
    ]  # fmt: skip


class Call(ctypes.Structure):
    _fields_ = [("function", _ptr), ("params", _ptr)]


class ReplayParams(ctypes.Structure):
    _fields_ = [("struct_size", _u64), ("count", _i64), ("calls", _ptr)]


FUNCTIONS: dict[str, type[ctypes.Structure]] = {
    "tpv_build_ddtree": DdtreeParams,
    "tpv_ancestry": AncestryParams,
    "tpv_accept_greedy": AcceptGreedyParams,
    "tpv_accept_sampled": AcceptSampledParams,
    "tpv_attention": AttentionParams,
    "tpv_linear": LinearParams,
    "tpv_rms_norm": RmsNormParams,
    "tpv_rope": RopeParams,
    "tpv_silu_mul": SiluMulParams,
    "tpv_place": PlaceParams,
    "tpv_replay": ReplayParams,
    "tpv_draft": TablesParams,
    "tpv_commit": TablesParams,
}


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # <malloc.h>


def library_dirs() -> Sequence[str]:
    """Where the built libraries may lie: an editable install has two package folders, the sources and the build's."""
    override = os.environ.get("TPVERIFY_LIB_DIR")
    if override:
        return [override]
    import tpverify

    return list(tpverify.__path__)


def find(name: str) -> Path | None:
    """The file `name` in the first library folder that has it."""
    return next((path for folder in library_dirs() if (path := Path(folder) / name).is_file()), None)


def build_info() -> dict[str, Any]:
    """What the build found and why a part was left out; empty when nothing was built (a plain source checkout)."""
    path = find("build_info.json")
    return json.loads(path.read_text()) if path else {}


def load(name: str, functions: Mapping[str, type[ctypes.Structure]]) -> ctypes.CDLL | str:
    """The library `name` with its functions, given by the struct that each takes, or why there is none.

    Raises ArgumentError for a library of another ABI.
    """
    path = find(name)
    if path is None:
        part = name.removeprefix("libtpverify_").removesuffix(".so")
        return build_info().get(f"{part}_reason") or f"no {name} in {', '.join(library_dirs())}"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"{path} does not load: {error}"
    library.tpv_abi_version.restype = _i32
    library.tpv_last_error.restype = ctypes.c_char_p
    version = library.tpv_abi_version()
    if version != ABI_VERSION:
        raise ArgumentError(str(path), f"ABI version {ABI_VERSION}", f"{version}: install again")
    for symbol, params in functions.items():
        function = getattr(library, symbol)
        function.argtypes, function.restype = [ctypes.POINTER(params)], ctypes.c_int
    return library


@functools.cache
def _load() -> ctypes.CDLL | str:
    setting = os.environ.get("TPVERIFY_NATIVE")
    if setting not in (None, "0", "1"):
        raise ArgumentError("TPVERIFY_NATIVE", "0 or 1", repr(setting))
    if setting == "0":
        return "switched off by TPVERIFY_NATIVE=0"
    found = load(HOST_LIBRARY, FUNCTIONS)
    if isinstance(found, str) and setting == "1":
        raise ArgumentError("TPVERIFY_NATIVE", "0 where there is no native host library", f"1: {found}")
    return found


def host() -> ctypes.CDLL | None:
    """The host library, loaded once; None when the Python twins are to run.

    Raises ArgumentError for a TPVERIFY_NATIVE that is neither 0 nor 1, or 1 without a library; for one of another ABI.
    """
    found = _load()
    return None if isinstance(found, str) else found


def host_status() -> str:
    """One line: where the host library was loaded from, or why there is none."""
    found = _load()
    return found if isinstance(found, str) else f"loaded from {found._name}"


def check(library: ctypes.CDLL, status: int) -> None:
    """Raises what a native status means: ArgumentError (1), MemoryError (2), RuntimeError (any other)."""
    if status == 0:
        return
    message = library.tpv_last_error().decode()
    if status == 1:
        argument, _, rest = message.partition(": expected ")
        expected, _, got = rest.rpartition(", got ")
        raise ArgumentError(argument, expected, got)
    raise MemoryError(message) if status == 2 else RuntimeError(message)


def keep_freed_memory() -> None:
    """Tell glibc to hand freed memory back to this process, not to the system. No effect elsewhere.

    By default every tensor above some size is mapped afresh, zeroed page by page and unmapped again: a quarter of a
    decode step's time on ranks that share cores. Call it before other threads allocate.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    for parameter, value in ((M_MMAP_THRESHOLD, 1 << 25), (M_TRIM_THRESHOLD, (1 << 31) - 1), (M_ARENA_MAX, 1)):
        mallopt(parameter, value)


def give_back(address: int, nbytes: int) -> None:
    """Return the whole pages of these bytes of this process to the system: they are zero when they are next read.

    For memory that only this process maps, as malloc's. Raises OSError if the system refuses.
    """
    page = mmap.PAGESIZE
    begin, end = -(-address // page) * page, (address + nbytes) // page * page
    if begin >= end:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), f"madvise of {end - begin} bytes")
