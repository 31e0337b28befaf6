"""Parity: green on this code, and red for every way of being wrong that it claims to see."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tpverify.report import oracle, parity
from tpverify.runtime.runtime import Verified, VerifyRuntime
from tpverify.tree import DraftTree

TREE = DraftTree.from_parents([5, 6, 7, 8], [-1, 0, 0, 1])
SEEN = [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 1, 0], [1, 1, 1, 1, 0, 1]]  # 2 committed, 4 nodes


def test_a_node_sees_the_prefix_its_ancestors_and_itself() -> None:
    assert oracle.visible(TREE, 2).int().tolist() == SEEN


def test_oracle_against_sums_written_out() -> None:
    generator = torch.Generator().manual_seed(0)
    q, rows = torch.randn(4, 2, 576, generator=generator), torch.randn(6, 576, generator=generator)
    out, lse = oracle.attention(q, rows, torch.tensor(SEEN, dtype=torch.bool), 0.05, torch.float64)
    for node, head in ((0, 0), (2, 1), (3, 0)):
        keys = [key for key in range(6) if SEEN[node][key]]
        scores = [
            0.05 * math.fsum(a * b for a, b in zip(q[node, head].tolist(), rows[key].tolist(), strict=True))
            for key in keys
        ]
        total = math.fsum(map(math.exp, scores))
        assert math.isclose(lse[node, head].item(), math.log(total), rel_tol=1e-12)
        for column in (0, 511):
            mean = math.fsum(math.exp(s) / total * rows[k, column].item() for s, k in zip(scores, keys, strict=True))
            assert math.isclose(out[node, head, column].item(), mean, rel_tol=1e-11)
    assert out.shape == (4, 2, 512) and out.dtype == torch.float64


def test_cases_are_balanced_reproducible_and_fit_the_ranks() -> None:
    cases = parity.draw_cases(24, 8, seed=3)
    assert cases == parity.draw_cases(24, 8, seed=3) != parity.draw_cases(24, 8, seed=4)
    for axis, values in (("prefix", 6), ("n", 4), ("heads", 3), ("dtype", 2), ("batch", 2)):
        seen = [getattr(case, axis) for case in cases]
        assert {seen.count(value) for value in seen} == {24 // values}
    assert {case.heads for case in parity.draw_cases(6, 32, seed=0)} == {64}
    assert {case.dtype for case in parity.draw_cases(6, 8, 0, parity.DTYPES["cuda"])} == {"bfloat16"}


CASE = parity.Case(prefix=65, n=8, heads=8, dtype="bfloat16", batch=1, seed=1)


@pytest.fixture(scope="module")
def request_and_result() -> tuple[parity.Request, parity.Result]:
    """A request, and its perfect result: float64 rounded once."""
    (request,) = parity._requests(CASE)
    rows, mask = torch.cat([request.prefix, request.latents]), oracle.visible(request.tree, 65)
    out, lse = oracle.attention(request.q, rows, mask, parity.SCALE, torch.float64)
    return request, (out.bfloat16(), lse.float())


def one_ulp(out: torch.Tensor, lse: torch.Tensor) -> Any:
    out.view(torch.int16)[3, 2, 100] += 1
    return out, lse


def one_lse_ulp(out: torch.Tensor, lse: torch.Tensor) -> Any:
    lse.view(torch.int32)[7, 7] += 1
    return out, lse


CHANGES = {"one ulp of out": (one_ulp, "same_out"), "one ulp of lse": (one_lse_ulp, "same_lse")}


@pytest.mark.parametrize("name", CHANGES)
def test_one_bit_between_the_ranks_is_a_miss(
    request_and_result: tuple[parity.Request, parity.Result], name: str
) -> None:
    request, perfect = request_and_result
    assert parity.judge(CASE, [request], [perfect], [perfect]).ok
    change, field = CHANGES[name]
    outcome = parity.judge(CASE, [request], [perfect], [change(*(tensor.clone() for tensor in perfect))])
    assert not outcome.ok and not getattr(outcome, field)
    assert outcome.same_out != outcome.same_lse and outcome.out_error <= outcome.out_tolerance


def test_the_sign_of_zero_counts(request_and_result: tuple[parity.Request, parity.Result]) -> None:
    request, (out, lse) = request_and_result
    zero, minus = out.clone(), out.clone()
    zero[0, 0, 0], minus[0, 0, 0] = 0.0, -0.0
    assert not parity.judge(CASE, [request], [(zero, lse)], [(minus, lse)]).same_out


def wrong_heads(out: torch.Tensor, lse: torch.Tensor) -> Any:
    return out.flip(1), lse.flip(1)


def wrong_value(out: torch.Tensor, lse: torch.Tensor) -> Any:
    out[5, 1, 300] += 0.1
    return out, lse


def wrong_base(out: torch.Tensor, lse: torch.Tensor) -> Any:
    return out, lse / math.log(2)  # FlashInfer's lse is in base 2


def not_a_number(out: torch.Tensor, lse: torch.Tensor) -> Any:
    out[7, 0, 511] = math.nan
    return out, lse


WRONG = (wrong_heads, wrong_value, wrong_base, not_a_number)


@pytest.mark.parametrize("corrupt", WRONG)
def test_the_same_mistake_on_every_number_of_ranks_is_a_miss(
    request_and_result: tuple[parity.Request, parity.Result], corrupt: Callable
) -> None:
    request, perfect = request_and_result
    result = corrupt(*(tensor.clone() for tensor in perfect))
    outcome = parity.judge(CASE, [request], [result], [result])
    assert not outcome.ok and not outcome.row()["ok"]


def test_a_node_that_sees_its_sibling_is_a_miss(request_and_result: tuple[parity.Request, parity.Result]) -> None:
    request, _ = request_and_result
    rows = torch.cat([request.prefix, request.latents])
    causal = torch.ones(8, 73, dtype=torch.bool).tril(65)  # a chain's mask: what causal kernels would compute
    out, lse = oracle.attention(request.q, rows, causal, parity.SCALE, torch.float64)
    result = (out.bfloat16(), lse.float())
    assert not parity.judge(CASE, [request], [result], [result]).ok


def test_the_worst_request_of_a_batch_decides(request_and_result: tuple[parity.Request, parity.Result]) -> None:
    request, perfect = request_and_result
    wrong = not_a_number(*(tensor.clone() for tensor in perfect))
    for results in ([perfect, wrong], [wrong, perfect]):
        outcome = parity.judge(CASE, [request, request], results, results)
        assert not outcome.ok and math.isnan(outcome.out_error)


@pytest.mark.ray
def test_command_is_green(tpverify: Callable, lent_ranks: None) -> None:
    done = tpverify("parity", "--tp", "2", "--cases", "6", "--device", "cpu", "--json")
    assert done.code == 0 and done.json["ok"] and done.json["missed"] == 0 and len(done.json["cases"]) == 6
    for row in done.json["cases"]:
        assert row["same_out"] and row["same_lse"] and row["ok"]
        assert 0 < row["out_error"] <= row["out_tolerance"] and 0 < row["lse_error"] <= row["lse_tolerance"]


@pytest.mark.ray
def test_command_is_red_when_two_ranks_give_another_bit(
    tpverify: Callable, lent_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = VerifyRuntime.verify

    def corrupted(self: VerifyRuntime, *arguments: Any, **options: Any) -> dict[int, Verified]:
        result = verify(self, *arguments, **options)
        if self.cfg.tp == 2:
            out = next(iter(result.values())).out
            out.view(torch.int16 if out.dtype == torch.bfloat16 else torch.int32).flatten()[-1] ^= 1
        return result

    monkeypatch.setattr(VerifyRuntime, "verify", corrupted)
    done = tpverify("parity", "--tp", "2", "--cases", "2", "--seed", "5", "--device", "cpu")
    assert done.code == 1 and done.out.count("MISS") == 2 and done.out.count("DIFFER") == 2
    assert "0 of 2 ok; bits equal to one rank's in 0 (seed 5)" in done.out
