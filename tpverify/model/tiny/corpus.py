"""The training text: a Python standard library's own sources (PSF licence 2), split by module.

heldout.txt lists the files the model never trains on. A library module is held out together with its own tests, so a
test cannot quote it; files that share more than a tenth of their line pairs with the rest were not eligible.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tpverify.errors import ArgumentError

# encodings: 120 generated code pages, alike; pydoc_data: one file of prose; the rest is not the standard library.
SKIPPED = {"encodings", "pydoc_data", "site-packages", "dist-packages", "lib-dynload", "__pycache__"}
SEPARATOR = b"\0"  # between documents; no source file may hold it


@dataclass(frozen=True)
class Corpus:
    """Documents by path relative to the library's root. lib and test are held out: test is the test package's part."""

    train: dict[str, bytes]
    lib: dict[str, bytes]
    test: dict[str, bytes]


def default_root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def documents(root: Path) -> dict[str, bytes]:
    """Every distinct UTF-8 .py file under root in path order. ArgumentError if there is none."""
    found: dict[bytes, str] = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED.intersection(name.parts) or not path.is_file():
            continue
        text = path.read_bytes()
        if text.strip() and SEPARATOR not in text and _is_utf8(text):
            found.setdefault(text, name.as_posix())
    if not found:
        raise ArgumentError("corpus", "a directory of .py files", str(root))
    return {name: text for text, name in found.items()}


def held_out() -> list[str]:
    return (Path(__file__).parent / "heldout.txt").read_text().split()


def load(root: Path | None = None) -> Corpus:
    """The split of the library at root, by default the running interpreter's."""
    texts = documents(root or default_root())
    held = set(held_out())
    kept = {name: text for name, text in texts.items() if name in held}
    return Corpus(
        train={name: text for name, text in texts.items() if name not in held},
        lib={name: text for name, text in kept.items() if not name.startswith("test/")},
        test={name: text for name, text in kept.items() if name.startswith("test/")},
    )


def joined(texts: dict[str, bytes], device: torch.device | str = "cpu") -> Tensor:
    """uint8 [n]: the documents one after another, each closed by the separator."""
    data = b"".join(text + SEPARATOR for text in texts.values())
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
