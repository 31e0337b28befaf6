"""What this machine has of what the runtime needs, and why a part is missing. Works without torch and Ray too."""

import functools
import importlib
import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tpverify
from tpverify import native
from tpverify.errors import ArgumentError

PACKAGES = ("numpy", "ray", "msgspec", "safetensors", "rich")
SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_BYTES = 256 << 20  # Ray's object store of 128 MB, and as much again beside it


@dataclass(frozen=True)
class Finding:
    """One line of the report. required: the runtime cannot run without it."""

    name: str
    found: bool
    detail: str
    required: bool = False


def inspect() -> list[Finding]:
    """Everything, in the order in which it is worth fixing."""
    python = Finding("Python 3.11 or later", sys.version_info >= (3, 11), platform.python_version(), required=True)
    findings = [Finding("tpverify", True, f"{tpverify.__version__} in {Path(tpverify.__file__).parent}"), python]
    for name, look in CHECKS.items():
        required = name in REQUIRED
        try:
            findings.append(Finding(name, *look(), required))
        except ArgumentError as refusal:  # as it will be whenever the part is used
            findings.append(Finding(name, False, str(refusal), required=True))
        except Exception as failure:  # whatever is wrong with a part, the rest of the report is wanted
            findings.append(Finding(name, False, f"{type(failure).__name__}: {failure}", required))
    return findings


def can_run(findings: list[Finding]) -> bool:
    return all(finding.found for finding in findings if finding.required)


Answer = tuple[bool, str]  # is it there, and which or why not


def _package(name: str) -> Answer:
    importlib.import_module(name)
    return True, importlib.metadata.version(name)


def _torch() -> Answer:
    import torch

    blas = "MKL" if torch.backends.mkl.is_available() else "no MKL: another BLAS"
    capability = torch.backends.cpu.get_cpu_capability()
    return True, f"{torch.__version__}, {blas}, {capability}, {torch.get_num_threads()} threads"


def _products() -> Answer:
    from tpverify.ops import gemm

    found = gemm.describe()
    sizes = f"{found['product_rows']} rows, {found['score_columns']} keys, {found['chain_rows']} rows of V"
    slow = "" if found["rows_independent"] else ": exact all the same, but slow"
    return bool(found["rows_independent"]), f"a row keeps its bits in products of up to {sizes}{slow}"


def _model() -> Answer:
    from tpverify.model.checkpoint import load_config, resolve

    config = load_config("tiny")
    size = sum(path.stat().st_size for path in resolve("tiny").rglob("*.safetensors"))
    return True, f"{config.num_hidden_layers} layers, {config.num_attention_heads} heads, {size / 1e6:.1f} MB"


def _native() -> Answer:
    """What runs the layers of CPU ranks; without it, torch's products do."""
    found, status = native.host() is not None, native.host_status()
    how = "by it, in float32" if found else "by torch's products: slower, and other last bits"
    return found, f"{status}; attention and dense layers of CPU ranks run {how}"


def _cuda_library() -> Answer:
    info = native.build_info()
    reason = info.get("cuda_reason") or "not built, or not where TPVERIFY_LIB_DIR says"
    return bool(info.get("cuda")), "built" if info.get("cuda") else reason


def _toolkit() -> Answer:
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=f"{home}/bin" if home else None)
    return nvcc is not None, nvcc or f"no nvcc in {home or 'PATH'}"


def _gpus() -> Answer:
    import torch

    count = torch.cuda.device_count()
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(count))
    missing = f"torch {torch.__version__} sees none" + ("" if torch.version.cuda else ": it was built without CUDA")
    return count > 0, names or missing


def _nccl() -> Answer:
    from tpverify import pynccl

    missing = pynccl.why_not()
    return missing is None, missing or pynccl.versions()


def _gpu_ranks() -> Answer:
    """What device="auto" does here."""
    import torch

    from tpverify.ops import cuda

    if missing := cuda.why_not() or cuda.other_gpus():
        return False, f"all ranks run on CPUs: {missing}"
    gpus = torch.cuda.device_count() if _nccl()[0] else 1
    return True, f"up to {gpus}, in bfloat16; attention in float32 runs on CPUs"


def _cores() -> Answer:
    count = len(os.sched_getaffinity(0))
    return True, f"{count} for this process; CPU ranks share them, one thread each"


def _shared_memory() -> Answer:
    free = shutil.disk_usage(SHARED_MEMORY).free
    note = (
        ""
        if free >= SHARED_MEMORY_BYTES
        else f", Ray wants {SHARED_MEMORY_BYTES >> 20} MB and takes files in its place"
    )
    return free >= SHARED_MEMORY_BYTES, f"{free >> 20} MB free in {SHARED_MEMORY}{note}"


CHECKS: dict[str, Callable[[], Answer]] = {
    "torch": _torch,
    **{name: functools.partial(_package, name) for name in PACKAGES},
    "shipped model": _model,
    "cores": _cores,
    "shared memory": _shared_memory,
    "fast exact products": _products,
    "native host library": _native,
    "CUDA library": _cuda_library,
    "CUDA toolkit": _toolkit,
    "GPUs": _gpus,
    "NCCL": _nccl,
    "GPU ranks": _gpu_ranks,
}
REQUIRED = {"torch", *PACKAGES}


def table(findings: list[Finding]) -> Any:
    from rich.table import Table

    rows = Table(show_header=False)
    for finding in findings:
        style = None if finding.found else "red" if finding.required else "yellow"
        rows.add_row(finding.name, "yes" if finding.found else "no", finding.detail, style=style)
    return rows
