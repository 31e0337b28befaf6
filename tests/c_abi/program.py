"""The program that uses the C ABI: how it is built, and run."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tpverify import native
from tpverify.ops import cuda

HERE, CSRC = Path(__file__).parent, Path(__file__).parents[2] / "csrc"
LIBRARY = native.find(cuda.CUDA_LIBRARY)
FLAGS = ["-std=c11", "-D_POSIX_C_SOURCE=200809L", "-O1", "-Wall", "-Wextra", "-pedantic", "-Werror"]

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="NOT run: no C compiler")
needs_library = pytest.mark.skipif(LIBRARY is None, reason=f"NOT run: no {cuda.CUDA_LIBRARY}")


def compiled(folder, *libraries):
    """Objects if there is no library, else the program."""
    sources = [HERE / name for name in ("main.c", "arguments.c", "kernels.c")]
    output = ["-o", folder / "check_abi", *libraries, "-ldl", "-lm"] if libraries else ["-c"]
    subprocess.run(["cc", *FLAGS, f"-I{CSRC}", *sources, *output], cwd=folder, check=True, timeout=120)
    return folder / "check_abi"


def linked(folder):
    return compiled(folder, LIBRARY, f"-Wl,-rpath,{LIBRARY.parent}")


def run(program, *files):
    done = subprocess.run([program, *files], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "passed", done.stdout + done.stderr
    return done.stdout
