"""Installing: with and without compilers, loud where it must be, and a C ABI laid out as the Python side has it."""

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tpverify import native
from tpverify.errors import ArgumentError
from tpverify.ops import cuda

ROOT = Path(__file__).parents[1]
DEADLINE = 300

needs_compiler = pytest.mark.skipif(
    not (shutil.which("c++") and shutil.which("cc") and shutil.which("nm")), reason="NOT run: no C/C++ compiler"
)

USE_TREES = """
import numpy as np
from tpverify import native
from tpverify.tree import accept_greedy, build_ddtree
tree = build_ddtree(np.log([[.7, .2, .1], [.6, .3, .1]]), root_token=9, budget=4)
path = accept_greedy(tree, [0, 1, 0, 0, 7]).path
print(native.host() is not None, native.host_status(), tree.tokens.tolist(), path.tolist(), sep="|")
"""


def copy_of_the_sources(folder):
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "build_info.json")
    for name in ("tpverify", "csrc"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder)
    return folder


def environment(**changes):
    """This process's environment without what would steer the build; None removes a variable."""
    clean = (
        "CC",
        "CXX",
        "CUDACXX",
        "TPV_HOST",
        "TPV_CUDA",
        "CMAKE_ARGS",
        "PYTHONPATH",
        "TPVERIFY_NATIVE",
        "TPVERIFY_LIB_DIR",
    )
    found = {k: v for k, v in os.environ.items() if k not in clean}
    found["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{found['PATH']}"
    return {k: v for k, v in (found | changes).items() if v is not None}


def without_compilers(folder):
    """An environment in which only cmake and ninja can be found."""
    tools = folder / "tools"
    tools.mkdir()
    for name in ("cmake", "ninja"):
        (tools / name).symlink_to(shutil.which(name, path=environment()["PATH"]))
    hidden = "-DCMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF"  # else CMake also looks in /usr/bin
    return environment(PATH=str(tools), CUDA_HOME=str(tools), CMAKE_ARGS=hidden)


def pip_wheel(sources, wheels, env):
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        str(sources),
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(wheels),
    ]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE)


def install(wheels, folder):
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return wheel.name


# Where the tests run, tpverify may be installed as editable, and that goes before PYTHONPATH.
FORGET_EDITABLE = "import sys; sys.meta_path = [f for f in sys.meta_path if 'ScikitBuild' not in type(f).__name__]\n"


def use(site, cwd, python=sys.executable, **changes):
    env = environment(PYTHONPATH=str(site) if site else None, **changes)
    code = FORGET_EDITABLE + USE_TREES if site else USE_TREES
    done = subprocess.run([python, "-c", code], env=env, cwd=cwd, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().split("|")


EXPECTED = ["[9, 0, 0, 1, 1]", "[0, 1, 3]"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return copy_of_the_sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="module")
def site(sources, tmp_path_factory):
    """An unpacked wheel with the host library."""
    wheels, site = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("site")
    done = pip_wheel(sources, wheels, environment(TPV_HOST="ON", TPV_CUDA="OFF"))
    assert done.returncode == 0, done.stdout + done.stderr
    install(wheels, site)
    return site


def test_wheel_without_any_compiler(sources, tmp_path):
    done = pip_wheel(sources, tmp_path / "wheels", without_compilers(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert install(tmp_path / "wheels", tmp_path / "site").startswith("tpverify-0.1.0-py3-none-")
    assert not list((tmp_path / "site").rglob("*.so"))
    info = json.loads((tmp_path / "site/tpverify/build_info.json").read_text())
    assert (info["host"], info["cuda"]) == (False, False) and "no compiler was found" in info["host_reason"]
    found, status, *results = use(tmp_path / "site", tmp_path)
    assert found == "False" and "no compiler was found" in status and results == EXPECTED


@needs_compiler
def test_wheel_with_a_compiler(site, tmp_path):
    found, status, *results = use(site, tmp_path)
    assert found == "True" and status == f"loaded from {site}/tpverify/libtpverify_host.so" and results == EXPECTED
    info = json.loads((site / "tpverify/build_info.json").read_text())
    assert info["host"] and info["cxx"] and info["cuda_reason"] == "left out by TPV_CUDA=OFF"
    assert (site / "tpverify/include/tpverify.h").read_text() == (ROOT / "csrc/tpverify.h").read_text()
    found, status, *results = use(site, tmp_path, TPVERIFY_NATIVE="0")
    assert (found, status, results) == ("False", "switched off by TPVERIFY_NATIVE=0", EXPECTED)


@needs_compiler
def test_wheel_holds_every_file_of_the_package(sources, site):
    """The checkpoint and the corpus split among them."""
    files = {str(path.relative_to(sources)) for path in (sources / "tpverify").rglob("*") if path.is_file()}
    assert files <= {str(path.relative_to(site)) for path in site.rglob("*")}
    assert "tpverify/tree/ddtree.py" in files


@needs_compiler
def test_editable_install_finds_the_library(sources, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True, timeout=DEADLINE)
    python = tmp_path / "venv/bin/python"
    packages = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    (packages / "outer.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    command = ["-m", "pip", "--python", python, "install", "-e", sources, "--no-deps", "--no-build-isolation"]
    env = environment(TPV_HOST="ON", TPV_CUDA="OFF")
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=env, capture_output=True, text=True, timeout=DEADLINE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found, status, *results = use(None, tmp_path, python=str(python))
    assert found == "True" and status == f"loaded from {packages}/tpverify/libtpverify_host.so" and results == EXPECTED


@pytest.mark.parametrize("option", ["TPV_HOST", "TPV_CUDA"])
def test_on_without_its_compiler_fails(sources, tmp_path, option):
    done = pip_wheel(sources, tmp_path / "wheels", without_compilers(tmp_path) | {option: "ON"})
    assert done.returncode != 0
    assert f"{option}=ON, but no compiler was found" in " ".join((done.stdout + done.stderr).split())


def test_unknown_option_value_fails(sources, tmp_path):
    done = pip_wheel(sources, tmp_path / "wheels", without_compilers(tmp_path) | {"TPV_CUDA": "yes"})
    assert done.returncode != 0 and "TPV_CUDA: expected AUTO, ON or OFF, got yes" in done.stdout + done.stderr


@needs_compiler
def test_a_compile_error_fails_the_install(tmp_path):
    """It must never become a silent install without the library, even though the library is optional."""
    broken = copy_of_the_sources(tmp_path)
    with open(broken / "csrc/host/accept.cc", "a") as file:
        file.write("\nint broken = ;\n")
    done = pip_wheel(broken, tmp_path / "wheels", environment(TPV_CUDA="OFF"))
    assert done.returncode != 0 and "accept.cc" in done.stdout + done.stderr
    assert not list((tmp_path / "wheels").glob("*.whl"))


@needs_compiler
def test_a_broken_compiler_fails_the_install(sources, tmp_path):
    done = pip_wheel(sources, tmp_path / "wheels", environment(CXX=shutil.which("false"), TPV_CUDA="OFF"))
    assert done.returncode != 0 and "C++ compiler" in " ".join((done.stdout + done.stderr).split())


@needs_compiler
def test_only_the_c_abi_is_exported(site):
    library = site / "tpverify/libtpverify_host.so"
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True, timeout=60
    )
    symbols = {line.split()[-1] for line in listed.stdout.splitlines()}
    assert symbols == {"tpv_abi_version", "tpv_last_error", *native.FUNCTIONS}


MIRRORS = {
    "tpv_ddtree_params": native.DdtreeParams,
    "tpv_ancestry_params": native.AncestryParams,
    "tpv_tree": native.Tree,
    "tpv_accept_greedy_params": native.AcceptGreedyParams,
    "tpv_accept_sampled_params": native.AcceptSampledParams,
    "tpv_attention_params": native.AttentionParams,
    "tpv_linear_params": native.LinearParams,
    "tpv_rms_norm_params": native.RmsNormParams,
    "tpv_rope_params": native.RopeParams,
    "tpv_silu_mul_params": native.SiluMulParams,
    "tpv_fetch_source": cuda.FetchSource,
    "tpv_fetch_params": cuda.FetchParams,
    "tpv_verify_split": cuda.VerifySplit,
    "tpv_verify_requests": cuda.VerifyRequests,
    "tpv_verify_workspace_params": cuda.VerifyWorkspaceParams,
    "tpv_verify_plan_params": cuda.VerifyPlanParams,
    "tpv_verify_run_params": cuda.VerifyRunParams,
    "tpv_move_rows_params": cuda.MoveRowsParams,
    "tpv_rope_cache_params": cuda.RopeCacheParams,
}


def test_every_struct_of_the_header_has_a_mirror():
    header = (ROOT / "csrc/tpverify.h").read_text()
    assert set(re.findall(r"^} (tpv_\w+);", header, re.M)) - {"tpv_status", "tpv_dtype", "tpv_kernel"} == set(MIRRORS)


# Between the host library and this package alone.
OWN_MIRRORS = {
    "tpv_place_params": native.PlaceParams,
    "tpv_call": native.Call,
    "tpv_replay_params": native.ReplayParams,
}
TABLES_MIRROR = {"tpv_tables_params": native.TablesParams}


@needs_compiler
@pytest.mark.parametrize(
    ("command", "header", "mirrors"),
    [
        # As C99 with every warning an error, which the header promises.
        (["cc", "-xc", "-std=c99", "-Wall", "-Wextra", "-pedantic", "-Werror"], "tpverify.h", MIRRORS),
        (["c++", "-xc++", "-std=c++20"], "host/replay.h", OWN_MIRRORS),
        (["c++", "-xc++", "-std=c++20"], "host/tables.h", TABLES_MIRROR),
    ],
    ids=["c abi", "own", "tables"],
)
def test_ctypes_mirrors_have_the_layout_of_the_header(tmp_path, command, header, mirrors):
    lines = []
    for name, mirror in mirrors.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field, *_ in mirror._fields_:
            size = f"sizeof((({name}*)0)->{field})"
            lines.append(f'printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), {size});')
    lines.append('printf("abi %d\\n", TPV_ABI_VERSION);')
    program = "#include <stddef.h>\n#include <stdio.h>\n#include <%s>\nint main(void) {\n%s\nreturn 0;\n}\n"
    (tmp_path / "offsets").write_text(program % (header, "\n".join(lines)))
    subprocess.run([*command, f"-I{ROOT / 'csrc'}", "offsets", "-o", "run"], cwd=tmp_path, check=True, timeout=60)
    printed = subprocess.run([tmp_path / "run"], check=True, capture_output=True, text=True, timeout=60).stdout
    expected = []
    for name, mirror in mirrors.items():
        expected.append(f"{name} {ctypes.sizeof(mirror)}")
        for field, *_ in mirror._fields_:
            place = getattr(mirror, field)
            expected.append(f"{name}.{field} {place.offset} {place.size}")
    assert printed.splitlines() == [*expected, f"abi {native.ABI_VERSION}"]


@pytest.fixture
def fresh(monkeypatch):
    native._load.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    native._load.cache_clear()


def test_native_setting_is_0_or_1(fresh):
    fresh.setenv("TPVERIFY_NATIVE", "yes")
    with pytest.raises(ValueError, match="TPVERIFY_NATIVE: expected 0 or 1, got 'yes'"):
        native.host()


def test_native_required_and_missing(fresh, tmp_path):
    fresh.setenv("TPVERIFY_LIB_DIR", str(tmp_path))
    assert native.host() is None and native.host_status() == f"no libtpverify_host.so in {tmp_path}"
    assert native.build_info() == {}
    native._load.cache_clear()
    fresh.setenv("TPVERIFY_NATIVE", "1")
    with pytest.raises(ArgumentError, match="^TPVERIFY_NATIVE: expected 0 where .* got 1: no libtpverify_host.so in"):
        native.host()


def test_a_file_that_is_no_library_is_reported(fresh, tmp_path):
    (tmp_path / "libtpverify_host.so").write_text("not a library")
    fresh.setenv("TPVERIFY_LIB_DIR", str(tmp_path))
    assert native.host() is None and "does not load" in native.host_status()


@needs_compiler
def test_a_library_of_another_abi_is_refused(fresh, tmp_path):
    source = "int tpv_abi_version(void) { return 99; }\nconst char* tpv_last_error(void) { return 0; }\n"
    (tmp_path / "old.c").write_text(source)
    command = ["cc", "-shared", "-fPIC", "old.c", "-o", "libtpverify_host.so"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    fresh.setenv("TPVERIFY_LIB_DIR", str(tmp_path))
    with pytest.raises(ArgumentError, match="expected ABI version 2, got 99: install again"):
        native.host()
    (tmp_path / "libtpverify_host.so").rename(tmp_path / cuda.CUDA_LIBRARY)
    with pytest.raises(ArgumentError, match="expected ABI version 2, got 99: install again"):
        native.load(cuda.CUDA_LIBRARY, cuda.FUNCTIONS)
