"""The corpus and its split: disjoint, by module, without near-copies across the line."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from tpverify.errors import ArgumentError
from tpverify.model.tiny import corpus


@pytest.fixture(scope="module")
def split() -> corpus.Corpus:
    return corpus.load()


def test_heldout_list_names_files_once() -> None:
    names = corpus.held_out()
    assert len(names) == len(set(names)) == 58
    assert sum(name.startswith("test/") for name in names) == 39


def test_parts_are_disjoint_and_cover_the_documents(split: corpus.Corpus) -> None:
    parts = [set(split.train), set(split.lib), set(split.test)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == len(corpus.documents(corpus.default_root()))
    assert not set(split.train) & set(corpus.held_out())
    assert split.lib and split.train


def test_a_held_out_module_takes_its_own_tests_along(split: corpus.Corpus) -> None:
    for name in split.lib:
        own = f"test/test_{name.removesuffix('.py')}"
        assert not [n for n in split.train if n == f"{own}.py" or n.startswith(f"{own}/")]


def test_held_out_text_is_not_in_the_training_text(split: corpus.Corpus) -> None:
    """At most 15 % of a held-out file's pairs of successive lines occur anywhere in the training files."""

    def pairs(text: bytes) -> list[tuple[bytes, bytes]]:
        lines = [line.strip() for line in text.splitlines() if len(line.strip()) > 3]
        return [pair for pair in zip(lines, lines[1:], strict=False) if len(pair[0]) + len(pair[1]) > 30]

    known = {hash(pair) for text in split.train.values() for pair in pairs(text)}
    for name, text in (split.lib | split.test).items():
        mine = pairs(text)
        assert sum(hash(pair) in known for pair in mine) <= 0.15 * len(mine) + 1, name


def test_no_document_twice(split: corpus.Corpus) -> None:
    texts = list((split.train | split.lib | split.test).values())
    assert Counter(texts).most_common(1)[0][1] == 1


def test_documents_skips_what_is_not_source(tmp_path: Path) -> None:
    files = {
        "a.py": b"x = 1\n",
        "copy.py": b"x = 1\n",
        "empty.py": b"\n",
        "latin.py": b"# \xe9\n",
        "zero.py": b"x\0\n",
        "notes.txt": b"x\n",
        "site-packages/b.py": b"y = 1\n",
        "encodings/cp1.py": b"z = 1\n",
        "pkg/c.py": b"w = 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text)
    assert corpus.documents(tmp_path) == {"a.py": b"x = 1\n", "pkg/c.py": b"w = 1\n"}


def test_no_sources_is_an_error_that_names_the_argument(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="corpus"):
        corpus.documents(tmp_path)


def test_joined_ends_every_document() -> None:
    stream = corpus.joined({"a": b"xy", "b": b"z"})
    assert stream.dtype == torch.uint8
    assert bytes(stream.tolist()) == b"xy\0z\0"
