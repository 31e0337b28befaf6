"""The GPU suite: builds the kernels, tests them, times them and writes the evidence.

    python bench/suite.py [--results FOLDER]

Needs a GPU, nvcc and nvdisasm. Everything runs with one fresh build, whose machine code is hashed into the file. Writes
FOLDER/<gpu>.json, bench/results by default, whatever the outcome; the exit code is 0 if the evidence holds. Where there
are two GPUs or more, suite_ranks.py then does the same for ranks, in a file of their own.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import cubins
import evidence
import runs
import suite_ranks
import torch

from tpverify.ending import ended
from tpverify.errors import ClusterError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=evidence.RESULTS, metavar="FOLDER")
    args = parser.parse_args()
    if not torch.cuda.is_available() or cubins.toolkit() is None:
        raise ClusterError("the suite needs a GPU that torch sees, and nvcc")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        library = cubins.build_library(folder)
        environment = runs.environment_of(folder)
        toolkit, hashes = str(cubins.toolkit()), cubins.hashes(library)
        found = {
            "toolkit": toolkit,
            "cubins": hashes,
            "sources": evidence.sources(),
            "sass": cubins.tile_loops(library, folder),
            "tests": runs.outcomes(runs.tests(environment, folder, [*evidence.GPU_TESTS, "-m", "gpu"])),
            **runs.bench(environment, "bench_verify.py"),
        }
        print(evidence.write(found, args.results))
        found["seal"] = evidence.seal(found)
        wrong = evidence.problems(found, evidence.Checkout(toolkit, hashes, evidence.sources(), evidence.gpu_tests()))
        print(evidence.quote(found))
        if torch.cuda.device_count() > 1:
            wrong += suite_ranks.collect(library, folder, args.results)
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(ended(Path(__file__).name, main))
