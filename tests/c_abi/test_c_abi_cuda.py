"""The same program on a GPU: every kernel against files of a float64 reference."""

import pytest
import references
from program import linked, needs_compiler, run

from tpverify.ops import cuda

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(cuda.why_not() is not None, reason=f"NOT run: {cuda.why_not()}")]


@needs_compiler
def test_every_kernel_against_reference_files(tmp_path, capsys):
    program = linked(tmp_path)
    for pair in references.write_all(tmp_path):
        printed = run(program, *pair)
        for name in ("naive", "flash_fp32", "flash, 16 rows", "flash, 32 rows", "flash, 64 rows", "move", "fetch"):
            assert f"\n{name}: " in printed
        with capsys.disabled():
            print(f"\n{printed}", end="")
