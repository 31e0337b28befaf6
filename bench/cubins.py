"""The machine code of the kernels: a fresh build of the CUDA library, hashes of what is in it, and what a tile costs.

A hash covers a kernel's instructions and constants, no names of folders, no debug information: the same sources, flags
and toolkit give the same hash on every machine. Of the planner for sm_90 they give now the one, now the other of two:
nvcc writes other PTX in 26 of 60 runs.
"""

import hashlib
import re
import shutil
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Collection
from pathlib import Path

CSRC = Path(__file__).parents[1] / "csrc"
ARCHS = {90: "sm_90", 120: "sm_120"}  # by the second byte of an ELF image's flags
MACHINE_CUDA = 190
SOURCES = (".py", ".cu", ".cuh", ".h", ".cc", ".txt")
# nvcc names the anonymous namespace of a file after a hash of its path.
ANONYMOUS = re.compile(r"\d+_GLOBAL__N__[0-9a-f]{8}_\d+_\w+?_cu_[0-9a-f]{8}(_\d+)?")


def build_library(folder: Path) -> Path:
    """libtpverify_cuda.so as CMakeLists.txt has it, with its ELF images uncompressed. Raises CalledProcessError."""
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DTPV_HOST=OFF", "-DTPV_CUDA=ON", "-DCMAKE_CUDA_FLAGS=--no-compress"]
    _run("cmake", "-G", "Ninja", "-S", str(CSRC), "-B", str(folder), *options)
    _run("cmake", "--build", str(folder))
    return folder / "libtpverify_cuda.so"


def compile_again(folder: Path, wanted: dict[str, dict[str, str]]) -> bool:
    """Compile the files of a build anew whose kernels have other hashes than `wanted`. False if there is none."""
    others = [
        path
        for path in folder.rglob("*.cu.o")
        for arch, kernels in hashes(path).items()
        if any(wanted.get(arch, {}).get(kernel) != value for kernel, value in kernels.items())
    ]
    for path in others:
        path.unlink(missing_ok=True)
    if others:
        _run("cmake", "--build", str(folder))
    return bool(others)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=280)


def toolkit() -> str | None:
    """nvcc's version, as 13.0.88; None without one."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    printed = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True, timeout=60).stdout
    return re.search(r"V([\d.]+)", printed)[1]  # type: ignore[index]


def images(library: Path) -> list[bytes]:
    """The uncompressed CUDA ELF images that a file holds."""
    data, found, start = library.read_bytes(), [], 0
    while (start := data.find(b"\x7fELF", start)) >= 0:
        if struct.unpack_from("<H", data, start + 18)[0] == MACHINE_CUDA:
            segments, table = struct.unpack_from("<QQ", data, start + 32)
            segment, segment_count, section, section_count = struct.unpack_from("<HHHH", data, start + 54)
            length = max(segments + segment * segment_count, table + section * section_count)  # the tables come last
            found.append(data[start : start + length])
        start += 4
    return found


def sections(image: bytes) -> dict[str, bytes]:
    """Contents by name of an ELF image's sections that lie in the file."""
    table = struct.unpack_from("<Q", image, 40)[0]
    size, count, names = struct.unpack_from("<HHH", image, 58)
    headers = [struct.unpack_from("<IIQQQQ", image, table + i * size) for i in range(count)]
    start = headers[names][4]
    found = {}
    for name, kind, _, _, offset, length in headers:
        if kind != 8:  # not SHT_NOBITS
            found[image[start + name : image.index(b"\0", start + name)].decode()] = image[offset : offset + length]
    return found


def arch_of(image: bytes) -> str:
    return ARCHS[struct.unpack_from("<I", image, 48)[0] >> 8 & 0xFF]


def hashes(library: Path) -> dict[str, dict[str, str]]:
    """{arch: {kernel: sha256 of its instructions and of the constants of its file}}, kernels by mangled name."""
    found: dict[str, dict[str, str]] = {arch: {} for arch in ARCHS.values()}
    for image in images(library):
        parts = sections(image)
        constants = b"".join(parts[name] for name in sorted(parts) if re.fullmatch(r"\.nv\.constant\d+", name))
        for name, code in parts.items():
            if name.startswith(".text."):
                kernel = ANONYMOUS.sub("", name.removeprefix(".text."))
                found[arch_of(image)][kernel] = hashlib.sha256(code + constants).hexdigest()
    return found


def disassembler() -> str | None:
    """nvdisasm of the toolkit, or of the wheel nvidia-cuda-nvdisasm."""
    wheels = [Path(entry) / "nvidia/cu13/bin/nvdisasm" for entry in sys.path]
    return shutil.which("nvdisasm") or next((str(path) for path in wheels if path.is_file()), None)


def tile_loops(library: Path, folder: Path) -> dict[str, dict[str, dict[str, dict[str, int]]]]:
    """{arch: {tile rows: {"qk" or "pv": instructions by kind}}} of the bf16 flash kernels: what a warp of that role
    runs for a tile of prefix tokens. Raises CalledProcessError."""
    found: dict[str, dict[str, dict[str, dict[str, int]]]] = {arch: {} for arch in ARCHS.values()}
    for image in images(library):
        names = [name for name in sections(image) if name.startswith(".text.")]
        shape = re.search(r"flash_verifyILi(\d)ELi(\d)E", " ".join(names))
        if shape:
            file = folder / "kernel.cubin"
            file.write_bytes(image)
            command = [disassembler() or "nvdisasm", "-c", str(file)]
            text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
            found[arch_of(image)][str(16 * int(shape[1]) * int(shape[2]))] = roles(loops_with_mma(text))
    return found


def roles(loops: list[dict[str, int]]) -> dict[str, dict[str, int]]:
    """A role's shortest loop is the one without mask and checks; QK has more tensor instructions than PV."""
    by_mma: dict[int, dict[str, int]] = {}
    for loop in sorted(loops, key=lambda loop: -sum(loop.values())):
        by_mma[loop["HMMA"]] = loop
    return {"qk": by_mma[max(by_mma)], "pv": by_mma[min(by_mma)]}


def loops_with_mma(text: str) -> list[dict[str, int]]:
    """Innermost loops, by backward branches, that hold tensor instructions: their instructions by kind. The longest
    part that a forward branch skips is left out: it raises the running maximum, which is rare."""
    lines = [line.split("*/", 1)[-1].strip() if "/*" in line else line.strip() for line in text.splitlines()]
    labels = {line[:-1]: i for i, line in enumerate(lines) if re.fullmatch(r"\.L_\w+:", line)}
    branches = []
    for i, line in enumerate(lines):
        target = re.search(r"\bBRA\S* .*`\((\.L_\w+)\)", line)
        if target and target[1] in labels:
            branches.append((i, labels[target[1]]))
    spans = {(to, i) for i, to in branches if to < i and any("HMMA" in line for line in lines[to:i])}
    inner = [a for a in spans if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
    found = []
    for begin, end in sorted(inner):
        skips = [(to - i, i, to) for i, to in branches if begin <= i < to <= end]
        _, skip, resume = max(skips, default=(0, end, end + 1))
        found.append(dict(sorted(Counter(kinds(lines[begin : skip + 1] + lines[resume : end + 1])).items())))
    return found


def kinds(lines: list[str]) -> list[str]:
    """Instructions without their modifiers, except the width of accesses to shared memory."""
    found = []
    for line in lines:
        match = re.match(r"(?:@!?U?P\w+ )?([A-Z][A-Z0-9_]*)((?:\.\w+)*)", line)
        if match and line.endswith(";"):
            width = re.search(r"\.(?:64|128)\b|(?<=88)\.[24]\b", match[2])
            found.append(match[1] + (width[0] if width and match[1] in ("LDS", "STS", "LDSM", "STSM") else ""))
    return found


def sources_hash(folder: Path, without: Collection[str] = ()) -> str:
    """Of all sources below a folder, by relative name, but those entries of it."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix not in SOURCES or path.relative_to(folder).parts[0] in without:
            continue
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
