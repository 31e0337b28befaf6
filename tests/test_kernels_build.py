"""Every kernel, compiled for both architectures: no spills, no local memory, no more shared memory than sm_120 has, and
no more registers than there are. No GPU is needed."""

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CSRC = ROOT / "csrc"
ARCHS = ("sm_90", "sm_120")
SHARED_LIMIT, REGISTERS = 101_376, 65_536
DYNAMIC = {"verify/flash_fp32.cu": 91_136}  # shared memory asked for at launch; flash_traits.h says it of the rest
# The template arguments of each flash kernel, by rows of a tile.
FLASH = {
    rows: re.search(r"launch_flash<(\d, \d)>", (CSRC / f"verify/flash_{rows}.cu").read_text())[1]
    for rows in (16, 32, 64)
}

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="NOT run: no nvcc")


def compile_kernel(source, arch, folder):
    """ptxas's report: {kernel: (registers, spill bytes, stack bytes, static shared memory)}."""
    command = ["nvcc", "-std=c++20", "-O3", f"-arch={arch}", f"-I{CSRC}", "-Xptxas=-v", "-cubin"]
    output = folder / f"{source.replace('/', '_')}.{arch}.cubin"
    done = subprocess.run([*command, CSRC / source, "-o", output], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    kernels = {}
    for part in done.stderr.split("Compiling entry function ")[1:]:
        stack, *spills = map(
            int, re.search(r"(\d+) bytes stack.* (\d+) bytes spill s.* (\d+) bytes spill l", part).groups()
        )
        registers = int(re.search(r"Used (\d+) registers", part)[1])
        shared = re.search(r"(\d+) bytes smem", part)
        kernels[re.match(r"'(\w+)'", part)[1]] = (registers, sum(spills), stack, int(shared[1]) if shared else 0)
    return kernels


@pytest.fixture(scope="module")
def traits(tmp_path_factory):
    """{tile rows: (threads, shared memory)} as flash_traits.h has them."""
    folder = tmp_path_factory.mktemp("traits")
    lines = [
        f'{{ using T = FlashTraits<{t}>; std::printf("%d %d %d\\n", T::kRows, T::kThreads, T::kSharedBytes); }}'
        for t in FLASH.values()
    ]
    source = '#include "verify/flash_traits.h"\n#include <cstdio>\nusing namespace tpv;\nint main() {\n%s\n}\n'
    (folder / "traits.cc").write_text(source % "\n".join(lines))
    command = ["c++", "-std=c++20", f"-I{CSRC}", folder / "traits.cc", "-o", folder / "traits"]
    subprocess.run(command, check=True, timeout=60)
    printed = subprocess.run([folder / "traits"], check=True, capture_output=True, text=True, timeout=60).stdout
    return {
        rows: (threads, shared) for rows, threads, shared in (map(int, line.split()) for line in printed.splitlines())
    }


@needs_nvcc
def test_kernels_fit_both_architectures(traits, tmp_path, capsys):
    flash = [f"verify/flash_{rows}.cu" for rows in FLASH]
    ladder = ["verify/naive.cu", "verify/flash_fp32.cu"]
    sources = ["verify/fetch.cu", "verify/planner.cu", "verify/combine.cu", "kv/move.cu", *ladder, *flash]
    sources += ["model/rope_cache.cu"]
    jobs = [(source, arch) for source in sources for arch in ARCHS]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda job: compile_kernel(*job, tmp_path), jobs))
    rows, broken = [], []
    for (source, arch), kernels in zip(jobs, found, strict=True):
        assert kernels, source
        for name, (registers, spills, stack, static) in kernels.items():
            tile = re.search(r"flash_(\d+)", source)
            threads, shared = traits[int(tile[1])] if tile else (256, static + DYNAMIC.get(source, 0))
            rows.append(f"{source:22} {arch:7} {registers:4} x {threads:3} {spills:4} {stack:4} {shared:7}")
            allocated = -(-registers // 8) * 8 * threads
            if spills or stack or shared > SHARED_LIMIT or allocated > REGISTERS:
                broken.append(f"{name}: {rows[-1]}")
    with capsys.disabled():
        print("\nsource                 arch    registers spills stack shared", *rows, sep="\n")
    assert not broken, broken
    assert {source for source, _ in jobs} | {"capi.cu"} == {str(p.relative_to(CSRC)) for p in CSRC.rglob("*.cu")}
