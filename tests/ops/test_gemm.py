"""Products whose rows do not know their neighbours, against float64 and against themselves in other company."""

import pytest
import torch

from tpverify.ops import gemm


def linear(x, weight):
    return gemm.matmul(gemm.pad_rows(x), weight.t())[: len(x)]


@pytest.mark.parametrize("probe", [True, False])
@pytest.mark.parametrize("m", [1, 7, 8, 33, 130, 300])
def test_a_row_has_the_same_bits_in_any_company(m, probe, monkeypatch):
    if not probe:
        monkeypatch.setattr(gemm, "rows_independent", lambda *_: False)
    generator = torch.Generator().manual_seed(m)
    x, weight = torch.randn(m, 256, generator=generator), torch.randn(96, 256, generator=generator)
    y = linear(x, weight)
    torch.testing.assert_close(y.double(), x.double() @ weight.double().T, atol=1e-4, rtol=1e-5)
    shuffle = torch.randperm(m, generator=generator)
    assert torch.equal(linear(x[shuffle], weight), y[shuffle])
    for i in range(0, m, 13):
        assert torch.equal(linear(x[i : i + 1], weight), y[i : i + 1])


@pytest.mark.parametrize("probe", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_a_head_has_the_same_bits_beside_any_others(shared, probe, monkeypatch):
    if not probe:
        monkeypatch.setattr(gemm, "heads_independent", lambda *_: False)
    generator = torch.Generator().manual_seed(3)
    x, weights = torch.randn(8, 36, 64, generator=generator), torch.randn(8, 64, 96, generator=generator)
    x = x[:1].expand(8, -1, -1) if shared else x
    y = gemm.matmul_heads(x[..., 8:40], weights[:, :32])
    torch.testing.assert_close(y.double(), x[..., 8:40].double() @ weights[:, :32].double(), atol=1e-4, rtol=1e-5)
    for first, last in ((0, 1), (2, 4), (3, 8)):
        assert torch.equal(gemm.matmul_heads(x[first:last, :12, 8:40], weights[first:last, :32]), y[first:last, :12])
    assert torch.equal(gemm.matmul(x[5, :, 8:40].contiguous(), weights[5, :32]), y[5])


def test_a_library_whose_heads_depend_on_their_number_is_noticed(monkeypatch):
    true_bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: true_bmm(a, b) * (1 + 1e-6 * (len(a) > 2)))
    assert gemm.heads_independent.__wrapped__(2, 32, 96)
    assert not gemm.heads_independent.__wrapped__(4, 32, 96)


def test_a_library_whose_rows_depend_on_their_number_is_noticed(monkeypatch):
    true_mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b: true_mm(a, b) * (1 + 1e-6 * (len(a) > 40)))
    assert not gemm.rows_independent.__wrapped__(256, 96, False)


def test_a_library_whose_rows_depend_on_their_place_is_noticed(monkeypatch):
    true_mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b: true_mm(a, b) * (1 + 1e-6 * (torch.arange(len(a)) % 8 == 7)[:, None]))
    assert not gemm.rows_independent.__wrapped__(256, 96, False)


def test_a_library_that_splits_sums_is_noticed(monkeypatch):
    def split(out, a, b):
        half = a.shape[1] // 2
        out += torch.mm(a[:, :half], b[:half])
        out += torch.mm(a[:, half:], b[half:])

    monkeypatch.setattr(gemm, "add_matmul", split)
    assert gemm.chain_rows.__wrapped__(528) == gemm.CHUNK
