"""The GPU suite: builds the kernels, tests them, times them and writes the evidence.

    python bench/suite.py [--results FOLDER]

Needs a GPU, nvcc and nvdisasm. Everything runs with one fresh build, whose machine code is hashed into the file. Writes
FOLDER/<gpu>.json, bench/results by default, whatever the outcome; the exit code is 0 if the evidence holds. Where there
are two GPUs or more, suite_ranks.py then does the same for ranks, in a file of their own.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import cubins
import evidence
import torch

DEADLINE_S = 1800


def run_tests(environment: dict[str, str], folder: Path) -> dict[str, str]:
    """{test: passed, failed or skipped} of tests/gpu."""
    report = folder / "tests.xml"
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-m", "gpu", f"--junitxml={report}"]
    subprocess.run(command, cwd=evidence.ROOT, env=environment, stdout=sys.stderr, timeout=DEADLINE_S)
    return outcomes(report.read_text())


def outcomes(report: str) -> dict[str, str]:
    """Of a JUnit report: file::test[case] to outcome."""
    found = {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        said = {child.tag for child in case}
        failed = "failed" if said & {"failure", "error"} else "passed"
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        found[name] = "skipped" if "skipped" in said else failed
    return found


def run_bench(environment: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, str(evidence.ROOT / "bench/bench_verify.py"), "--json"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def environment_of(library_folder: Path) -> dict[str, str]:
    """Of processes that run this checkout with the library in this folder."""
    paths = [str(evidence.ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"TPVERIFY_LIB_DIR": str(library_folder), "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=evidence.RESULTS, metavar="FOLDER")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        library = cubins.build_library(folder)
        environment = environment_of(folder)
        toolkit, hashes = str(cubins.toolkit()), cubins.hashes(library)
        found = {
            "toolkit": toolkit,
            "cubins": hashes,
            "sources": evidence.sources(),
            "sass": cubins.tile_loops(library, folder),
            "tests": run_tests(environment, folder),
            **run_bench(environment),
        }
        print(evidence.write(found, args.results))
        found["seal"] = evidence.seal(found)
        wrong = evidence.problems(found, evidence.Checkout(toolkit, hashes, evidence.sources(), evidence.gpu_tests()))
        print(evidence.quote(found))
        if torch.cuda.device_count() > 1:
            import suite_ranks

            wrong += suite_ranks.collect(library, folder, args.results)
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
