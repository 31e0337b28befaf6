"""The C ABI from C: a program that includes tpverify.h alone, linked with the library."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import references

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


@needs_compiler
def test_the_header_is_all_that_a_program_needs(tmp_path):
    compiled(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"main.o", "arguments.o", "kernels.o"}
    assert re.findall(r"#include [<\"](.*)[>\"]", (CSRC / "tpverify.h").read_text()) == ["stdint.h"]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("program"), LIBRARY, f"-Wl,-rpath,{LIBRARY.parent}")


def run(program, *files):
    done = subprocess.run([program, *files], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "passed", done.stdout + done.stderr
    return done.stdout


@needs_compiler
@needs_library
def test_wrong_arguments_give_a_status_and_a_message(program):
    """Without a GPU, too: whatever needs no driver is checked before what does."""
    (count,) = re.findall(r"(\d+) wrong arguments refused", run(program))
    assert int(count) >= 83


@needs_library
def test_every_declared_function_is_in_its_library():
    host = native.find(native.HOST_LIBRARY)
    headers = "".join((CSRC / name).read_text() for name in ("tpverify.h", "host/replay.h", "host/tables.h"))
    declared = set(re.findall(r"^TPV_API .*?\b(tpv_\w+)\(", headers, re.M))
    found = set()
    for library in filter(None, (host, LIBRARY)):
        listed = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True)
        names = {line.split()[-1] for line in listed.stdout.splitlines()}
        assert names <= declared
        found |= names
    assert found == declared or host is None


@needs_compiler
@needs_library
@pytest.mark.gpu
@pytest.mark.skipif(cuda.why_not() is not None, reason=f"NOT run: {cuda.why_not()}")
def test_every_kernel_against_reference_files(program, tmp_path, capsys):
    for pair in references.write_all(tmp_path):
        printed = run(program, *pair)
        for name in ("naive", "flash_fp32", "flash, 16 rows", "flash, 32 rows", "flash, 64 rows", "move"):
            assert f"\n{name}: " in printed
        with capsys.disabled():
            print(f"\n{printed}", end="")
