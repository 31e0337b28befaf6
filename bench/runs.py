"""This checkout's tests and benches, each in a process of its own, with one build of the kernels."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import evidence

DEADLINE_S = 1800


def environment_of(library_folder: Path) -> dict[str, str]:
    """Of processes that run this checkout with the library in this folder."""
    paths = [str(evidence.ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"TPVERIFY_LIB_DIR": str(library_folder), "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def tests(environment: dict[str, str], folder: Path, options: Sequence[str]) -> str:
    """pytest's JUnit report, with the properties that tests record. folder: for its file."""
    report = folder / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", "-o", "junit_family=xunit1", *options]
    subprocess.run(command, cwd=evidence.ROOT, env=environment, stdout=sys.stderr, timeout=DEADLINE_S)
    return report.read_text()


def outcomes(report: str) -> dict[str, str]:
    """Of a JUnit report: file::test[case] to passed, failed or skipped."""
    found = {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        said = {child.tag for child in case}
        failed = "failed" if said & {"failure", "error"} else "passed"
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        found[name] = "skipped" if "skipped" in said else failed
    return found


def bench(environment: dict[str, str], script: str, options: Sequence[str] = ()) -> dict[str, Any]:
    """What a script of bench/ prints with --json. Raises CalledProcessError."""
    command = [sys.executable, str(evidence.ROOT / "bench" / script), *options, "--json"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found
