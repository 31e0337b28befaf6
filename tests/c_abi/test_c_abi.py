"""The C ABI from C: a program that includes tpverify.h alone, linked with the library."""

import re
import subprocess

from program import CSRC, LIBRARY, compiled, linked, needs_compiler, needs_library, run

from tpverify import native


@needs_compiler
def test_the_header_is_all_that_a_program_needs(tmp_path):
    compiled(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"main.o", "arguments.o", "kernels.o"}
    assert re.findall(r"#include [<\"](.*)[>\"]", (CSRC / "tpverify.h").read_text()) == ["stdint.h"]


@needs_compiler
@needs_library
def test_wrong_arguments_give_a_status_and_a_message(tmp_path):
    """Without a GPU, too: whatever needs no driver is checked before what does."""
    (count,) = re.findall(r"(\d+) wrong arguments refused", run(linked(tmp_path)))
    assert int(count) >= 90


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
