"""What tests of several folders share."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tpverify import native

CSRC = Path(__file__).parents[1] / "csrc"

# A shell makes what it runs in the background ignore Ctrl-C, and so would the processes that tests start to interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def host_library(tmp_path_factory):
    """The installed host library, else one built here from csrc; no compiler means a reported skip, not a pass."""
    if os.environ.get("TPVERIFY_NATIVE") == "0":
        pytest.skip("the native half was NOT run: TPVERIFY_NATIVE=0")
    if native.host() is not None:
        return native.host()
    tools = [shutil.which(name) for name in ("cmake", "c++")]
    if not all(tools):
        pytest.skip("the native half was NOT run: no cmake or no C++ compiler")
    build, install = tmp_path_factory.mktemp("build"), tmp_path_factory.mktemp("install")
    for arguments in (
        ["-S", CSRC, "-B", build, "-DTPV_HOST=ON", "-DTPV_CUDA=OFF", "-DCMAKE_BUILD_TYPE=Release"],
        ["--build", build],
        ["--install", build, "--prefix", install],
    ):
        subprocess.run(["cmake", *map(str, arguments)], check=True, timeout=300)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPVERIFY_LIB_DIR", str(install / "tpverify"))
        native._load.cache_clear()
        library = native.host()
    assert library is not None, native.host_status()
    native._load.cache_clear()
    return library
