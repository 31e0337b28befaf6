"""The doctor: finds what is there, says why a part is missing, and keeps going when a part is broken."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tpverify import doctor

HIDE_TORCH = """
import sys
sys.modules["torch"] = None
sys.modules["ray"] = None
from tpverify.cli import main
sys.exit(main(["doctor"]))
"""


def test_this_machine_can_run(tpverify: Callable) -> None:
    done = tpverify("doctor", "--json")
    findings = {finding["name"]: finding for finding in done.json["findings"]}
    assert done.code == 0 and done.json["can_run"]
    assert findings["torch"]["detail"].startswith(torch.__version__)
    assert {"tpverify", "ray", "msgspec", "native host library", "CUDA library", "GPUs", "cores"} <= set(findings)
    assert all(finding["detail"] for finding in findings.values())
    assert all(finding["found"] for finding in findings.values() if finding["required"])


def test_without_torch_and_ray_it_says_so_and_fails() -> None:
    done = subprocess.run([sys.executable, "-c", HIDE_TORCH], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr == ""
    lines = {line.split("│")[1].strip(): line for line in done.stdout.splitlines() if line.startswith("│")}
    assert all("no" in lines[name].split("│")[2] for name in ("torch", "ray"))
    assert "yes" in lines["numpy"].split("│")[2] and "cannot run" in done.stdout


def test_a_missing_native_library_does_not_matter(
    tpverify: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor.native, "host", lambda: None)
    monkeypatch.setattr(doctor.native, "host_status", lambda: "no compiler was found")
    done = tpverify("doctor", "--json")
    (finding,) = (finding for finding in done.json["findings"] if finding["name"] == "native host library")
    assert done.code == 0 and not finding["found"]
    assert finding["detail"].startswith("no compiler was found; attention and dense layers of CPU ranks run by torch")


def test_what_runs_the_layers_of_cpu_ranks_is_said(host_library: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.native, "host", lambda: host_library)
    monkeypatch.setattr(doctor.native, "host_status", lambda: "loaded from here")
    findings = {finding.name: finding for finding in doctor.inspect()}
    finding = findings["native host library"]
    assert finding.found and finding.detail == (
        "loaded from here; attention and dense layers of CPU ranks run by it, in float32"
    )


def test_a_check_that_breaks_is_reported_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> doctor.Answer:
        raise RuntimeError("driver version is insufficient")

    monkeypatch.setitem(doctor.CHECKS, "cores", broken)
    findings = {finding.name: finding for finding in doctor.inspect()}
    assert findings["cores"].detail == "RuntimeError: driver version is insufficient"
    assert "GPUs" in findings and not findings["cores"].found and doctor.can_run(list(findings.values()))
