"""What scripts of bench/ cannot do they say in one line, before they have worked for it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[1] / "bench"
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="NOT run: there is a GPU")


@pytest.mark.parametrize(
    ("script", "options", "code", "line"),
    [
        ("bench_generate.py", ["--tps", "0"], 2, "size: expected an int from 1 to "),
        ("bench_step.py", ["--ranks", "0"], 2, "size: expected an int from 1 to "),
        pytest.param("bench_generate.py", ["--device", "cuda"], 1, "asked for 1 rank", marks=NO_GPU),
        pytest.param("suite.py", [], 1, "the suite needs a GPU that torch sees, and nvcc", marks=NO_GPU),
        pytest.param("suite_ranks.py", [], 1, "the suite needs two GPUs, torch sees 0", marks=NO_GPU),
    ],
)
def test_one_line_and_an_exit_code(script: str, options: list[str], code: int, line: str) -> None:
    command = [sys.executable, str(BENCH / script), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.splitlines()[-1].startswith(f"{script}: {line}") and "Traceback" not in done.stderr
