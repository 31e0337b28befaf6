"""What a checkpoint's directory says: JSON objects, and tensors by name from one safetensors file or from shards."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tpverify.config import check_int, check_number
from tpverify.errors import ArgumentError, describe

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth")
WEIGHTS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

MAX_LAYERS = 1024  # every layer's names are made before a file is opened

Places = dict[str, Path]  # a tensor's name -> the file that holds it


def read_object(file: Path, name: str) -> dict[str, Any]:
    """The object in a JSON file. ArgumentError, calling it `name`, if there is none."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentError(name, "JSON", error) from None
    if not isinstance(raw, dict):
        raise ArgumentError(name, "an object", describe(raw))
    return raw


def check_fields(config: Any, prefix: str = "") -> None:
    """Check the int, float and bool fields of a frozen dataclass, by their annotations: positive, and of that type."""
    for field in fields(config):
        value, name = getattr(config, field.name), prefix + field.name
        if field.type == "int":
            check_int(name, value, 1, 2**31 - 1)
        elif field.type == "float":
            check_number(name, value, "a positive number", math.ulp(0.0), sys.float_info.max)
        elif field.type == "bool" and type(value) is not bool:
            raise ArgumentError(name, "true or false", describe(value))


def find_tensors(directory: Path) -> Places:
    """Where every tensor is, by the index of a sharded set or by the header of the only file. Raises ArgumentError."""
    if (directory / INDEX).is_file():
        shards = read_object(directory / INDEX, INDEX).get("weight_map")
        if not isinstance(shards, dict):
            raise ArgumentError(INDEX, "a weight_map, an object", describe(shards))
        for file in shards.values():
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                raise ArgumentError(INDEX, "safetensors files in the checkpoint's own directory", describe(file))
        return {name: directory / file for name, file in shards.items()}
    if (directory / SINGLE).is_file():
        return dict.fromkeys(_header(directory / SINGLE), directory / SINGLE)
    found = sorted(p.name for p in directory.iterdir() if p.suffix in (*PICKLES, ".safetensors"))
    raise ArgumentError("model", f"{SINGLE} or {INDEX} in {directory}", found or "no weights")


def check_tensors(places: Places, shapes: Mapping[str, tuple[int, ...]], prefix: str = "") -> None:
    """Raise ArgumentError, naming a tensor, unless the files have all of `shapes`. Reads their headers, no weights."""
    headers = {file: _header(file) for file in sorted({places[name] for name in shapes if name in places})}
    for name, shape in shapes.items():
        found = headers[places[name]].get(name) if name in places else None
        if found is None:
            where = places[name].name if name in places else "the checkpoint"
            raise ArgumentError(prefix + name, f"a tensor in {where}", "none")
        if found[0] != shape:
            raise ArgumentError(prefix + name, f"shape {shape}", found[0])
        if found[1] not in WEIGHTS:
            raise ArgumentError(prefix + name, "float32, bfloat16 or float16", found[1])


def read_tensors(places: Places, names: Mapping[str, Any]) -> dict[str, Tensor]:
    """Those tensors in their stored dtype, on the CPU. Raises ArgumentError for NaN and infinities."""
    tensors: dict[str, Tensor] = {}
    for file in sorted({places[name] for name in names}):
        with _open(file) as shard:
            tensors |= {name: shard.get_tensor(name) for name in names if places[name] == file}
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ArgumentError(name, "finite weights", "NaN or infinity")
    return tensors


def _header(file: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every tensor in the file."""
    with _open(file) as shard:
        slices = {name: shard.get_slice(name) for name in shard.keys()}
        return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}


def _open(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt")
    except (OSError, ValueError, SafetensorError) as error:  # ValueError: a name that no file can have
        raise ArgumentError(str(file), "a readable safetensors file", error) from None
