"""Dense layers by the host library and by torch: against float64, and against themselves in other company."""

import ctypes
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

from tpverify import native
from tpverify.errors import ArgumentError
from tpverify.ops import dense


@pytest.fixture(params=["host library", "torch"])
def way(request, monkeypatch):
    library = request.getfixturevalue("host_library") if request.param == "host library" else None
    monkeypatch.setattr(native, "host", lambda: library)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def strided(x):
    """The same numbers in rows of another matrix, NaN beside them."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 5), torch.nan)
    wide[..., 3:-2] = x
    return wide[..., 3:-2]


# Every layer as a function of its rows alone: for float32 rows, and what float64 makes of them.
GATES = torch.tensor([0.0, -0.0, 1e-30, 87.5, -87.5, 200.0, -200.0, 1e30, -1e30])
WEIGHT, HEADS = normal(100, 37, seed=1), normal(3, 24, 40, seed=2)
ANGLES = normal(300, 20, seed=3)


def linear(x):
    return dense.Linear(WEIGHT)(x)


def linear_add(x):
    return dense.Linear(F.pad(WEIGHT, (0, 0, 0, -63)))(x, add=x.contiguous())


def heads(x):
    return dense.Linear(HEADS)(x.unflatten(1, (3, 40)))


def shared_rows(x):
    return dense.Linear(HEADS)(x[:, None, :40].expand(-1, 3, -1))


def rms_norm(x):
    return dense.rms_norm(x, WEIGHT[0], 1e-3)


def silu_mul(x):
    return dense.silu_mul(x)


LAYERS = {
    "linear": (37, linear, lambda x: x @ WEIGHT.double().T),
    "linear and a sum": (37, linear_add, lambda x: x @ WEIGHT[:37].double().T + x),
    "heads": (120, heads, lambda x: torch.einsum("mhk,hnk->mhn", x.unflatten(1, (3, 40)), HEADS.double())),
    "heads of shared rows": (45, shared_rows, lambda x: torch.einsum("mk,hnk->mhn", x[:, :40], HEADS.double())),
    "rms_norm": (
        37,
        rms_norm,
        lambda x: WEIGHT[0].double() * x / (x.square().mean(1, keepdim=True) + 1e-3).sqrt(),
    ),
    "silu_mul": (74, silu_mul, lambda x: F.silu(x[:, :37]) * x[:, 37:]),
}
every_layer = pytest.mark.parametrize(("width", "layer", "exact"), LAYERS.values(), ids=LAYERS)


@every_layer
@pytest.mark.parametrize("m", [0, 1, 2, 3, 4, 5, 6, 7, 33, 130])
def test_it_is_what_float64_says(width, layer, exact, m, way):
    x = normal(m, width)
    torch.testing.assert_close(layer(x).double(), exact(x.double()), atol=2e-5, rtol=2e-5)


@every_layer
def test_a_row_has_the_same_bits_in_any_company(width, layer, exact, way):
    x = normal(300, width)
    y = layer(x)
    shuffle = torch.randperm(300, generator=torch.Generator().manual_seed(4))
    assert torch.equal(layer(x[shuffle]), y[shuffle])
    assert torch.equal(layer(strided(x)), y)
    for m in range(1, 300):
        assert torch.equal(layer(x[300 - m :]), y[300 - m :]), m


@every_layer
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_spoils_its_own_row_only(width, layer, exact, value, way):
    x = normal(9, width)
    y = layer(x)
    x[4, 3] = value
    spoiled = layer(x)
    assert torch.equal(spoiled[4].isfinite(), exact(x.double())[4].isfinite())
    assert torch.equal(spoiled[4].isnan(), exact(x.double())[4].isnan())
    spoiled[4] = y[4]
    assert torch.equal(spoiled, y)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dim", [40, 64, 2])
def test_rope_rotates_pairs(dim, interleaved, way):
    x, angles = normal(300, 3, dim), normal(300, dim // 2, seed=3)
    cos, sin = angles.cos(), angles.sin()
    y = dense.rope(x, cos, sin, interleaved)
    pairs = x.double().unflatten(-1, (-1, 2)) if interleaved else x.double().unflatten(-1, (2, -1)).transpose(-1, -2)
    rotated = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(()).double(), angles.double())[:, None]
    expected = torch.cat([rotated.real, rotated.imag], -1)
    torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-5)
    for m in (1, 2, 5, 33):
        assert torch.equal(dense.rope(x[-m:], cos[-m:], sin[-m:], interleaved), y[-m:])
    out = strided(torch.zeros_like(x))
    assert dense.rope(strided(x)[:, 1:], cos, sin, interleaved, out[:, 1:]) is not None
    assert torch.equal(out[:, 1:], y[:, 1:]) and not out[:, 0].any()


def test_a_head_has_the_same_bits_beside_any_others(way):
    x = normal(33, 3, 40)
    y = dense.Linear(HEADS)(x)
    for first, last in ((0, 1), (1, 3), (2, 3)):
        assert torch.equal(dense.Linear(HEADS[first:last])(x[:, first:last]), y[:, first:last])


def test_results_go_where_they_are_wanted(way):
    x, out = normal(5, 37), torch.full((5, 250), torch.nan)
    dense.Linear(WEIGHT)(x, out=out[:, 7:107])
    dense.rms_norm(x, WEIGHT[0], 1e-3, out[:, 200:237])
    assert torch.equal(out[:, 7:107], linear(x)) and torch.equal(out[:, 200:237], rms_norm(x))
    assert out.isnan().sum() == 5 * (250 - 137)


@pytest.mark.parametrize("m", [0, 1, 5])
def test_a_sum_may_lie_in_memory_as_it_likes(m, way):
    x, layer = normal(m, 37), dense.Linear(WEIGHT)
    sums = normal(100, m), normal(m, 200)[:, 50:150], normal(100).expand(m, -1)
    for add in (sums[0].t(), *sums[1:]):
        expected = layer(x, add=add.contiguous())
        assert torch.equal(layer(x, add=add), expected)
        assert torch.equal(layer(x, add=add, out=torch.full((m, 250), torch.nan)[:, 7:107]), expected)


def test_a_weight_may_be_a_column(way):
    x, wide = normal(5, 37), normal(37, 3)
    assert torch.equal(dense.rms_norm(x, wide[:, 1], 1e-3), dense.rms_norm(x, wide[:, 1].contiguous(), 1e-3))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: dense.Linear(WEIGHT)(x[:, :36]),
        lambda x: dense.Linear(WEIGHT)(x.double()),
        lambda x: dense.rms_norm(x, WEIGHT[0, :36], 1e-3),
        lambda x: dense.silu_mul(x),
        lambda x: dense.rope(x[:, None, :36], x[:3, :18], x[:3, :18], True),
        lambda x: dense.rope(x[:, None, :36], x[:, :17], x[:, :17], True),
    ],
)
def test_shapes_that_do_not_fit_read_no_other_memory(call, way):
    with pytest.raises((AssertionError, RuntimeError)):
        call(normal(5, 37))


def test_gates_from_tiny_to_huge_match_float64(way):
    gates = GATES.repeat(2, 3)
    y = dense.silu_mul(torch.cat([gates, torch.ones_like(gates)], dim=1))
    torch.testing.assert_close(y.double(), F.silu(gates.double()), atol=1e-36, rtol=1e-6)


def test_threads_change_no_bit(way):
    x = normal(64, 37)
    layer = dense.Linear(WEIGHT)
    y = layer(x)
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(again, y) for again in pool.map(lambda _: layer(x), range(32)))


def test_other_types_go_to_torch(host_library, monkeypatch):
    monkeypatch.setattr(native, "host", lambda: host_library)
    assert dense.runs_natively(torch.float32)
    assert not dense.runs_natively(torch.float64) and not dense.runs_natively(torch.bfloat16)
    x = normal(5, 37).double()
    assert torch.equal(dense.rms_norm(x, WEIGHT[0].double(), 0.0).square().isfinite(), torch.ones(5, 37, dtype=bool))


@pytest.mark.parametrize("m", [0, 1, 5])
def test_rows_go_to_their_places(m, way):
    x, at, out = strided(normal(m, 37)), torch.tensor([7, 2, 0, 9, 4])[:m], torch.full((10, 50), torch.nan)
    dense.place(x, out[:, 4:41], at, scale=0.3)
    others = [i for i in range(10) if i not in at.tolist()]
    assert torch.equal(out[at, 4:41], x * 0.3) and out[others].isnan().all() and out[:, :4].isnan().all()
    assert torch.equal(dense.place(x, torch.empty(m, 37)), x)


def test_a_place_beyond_the_rows_is_refused(host_library, monkeypatch):
    monkeypatch.setattr(native, "host", lambda: host_library)
    for at in (-1, 9):
        with pytest.raises(ArgumentError, match=f"^at: expected places below 9, got {at}"):
            dense.place(normal(1, 4), torch.zeros(9, 4), torch.tensor([at]))


def test_a_recording_does_again_what_was_done_in_its_order(host_library, monkeypatch):
    monkeypatch.setattr(native, "host", lambda: host_library)
    x, y, seen = normal(5, 37), torch.empty(5, 37), []
    layer = dense.Linear(WEIGHT[:37])

    def body():
        between = layer(dense.rms_norm(x, WEIGHT[0], 1e-3))
        dense.perform(lambda: seen.append(between.clone()))
        dense.place(layer(between), y)

    recording = dense.Recording(body)
    for seed in (0, 5, 6):
        x.copy_(normal(5, 37, seed=seed))
        recording.replay()
        expected = layer(rms_norm(x))
        assert torch.equal(seen[-1], expected) and torch.equal(y, layer(expected))
    assert len(seen) == 4 and torch.equal(seen[0], seen[1])


def test_what_is_not_recorded_is_not_replayed(host_library, monkeypatch):
    monkeypatch.setattr(native, "host", lambda: host_library)
    x, y = normal(5, 37), torch.empty(5, 37)
    with pytest.raises(ZeroDivisionError):
        dense.Recording(lambda: 1 / 0)
    recording = dense.Recording(lambda: dense.perform(lambda: None))
    dense.place(x, y)
    y.zero_()
    recording.replay()
    assert not y.any()


GOOD = {
    "tpv_linear": {
        "rows": 2, "inputs": 3, "outputs": 4, "heads": 2, "x_stride_row": 6, "x_stride_head": 3, "y_stride_row": 8,
        "y_stride_head": 4, "x": 1, "weight": 1, "y": 1,
    },
    "tpv_rms_norm": {"rows": 2, "columns": 4, "x_stride_row": 4, "y_stride_row": 4, "x": 1, "weight": 1, "y": 1},
    "tpv_rope": {
        "rows": 2, "heads": 2, "dim": 4, "x_stride_row": 8, "x_stride_head": 4, "y_stride_row": 8, "y_stride_head": 4,
        "x": 1, "cos": 1, "sin": 1, "y": 1,
    },
    "tpv_silu_mul": {"rows": 2, "columns": 4, "x": 1, "y": 1},
    "tpv_place": {"rows": 2, "columns": 4, "places": 9, "x_stride_row": 4, "y_stride_row": 4, "x": 1, "y": 1},
}  # fmt: skip
POINTERS = {"x", "weight", "y", "cos", "sin"}


@pytest.mark.parametrize(("function", "field"), [(name, field) for name, fields in GOOD.items() for field in fields])
def test_a_wrong_argument_is_refused_by_name(function, field, host_library):
    struct = native.FUNCTIONS[function]
    memory = torch.zeros(256)
    good = {name: memory.data_ptr() if name in POINTERS else value for name, value in GOOD[function].items()}
    call = getattr(host_library, function)
    assert call(struct(struct_size=ctypes.sizeof(struct), **good)) == 0
    wrong = good | {field: None if field in POINTERS else -1}
    with pytest.raises(ArgumentError, match=f"^{field}: expected "):
        native.check(host_library, call(struct(struct_size=ctypes.sizeof(struct), **wrong)))


def test_an_odd_rope_is_refused(host_library):
    size = ctypes.sizeof(native.RopeParams)
    with pytest.raises(ArgumentError, match="^dim: expected an even number, got 5"):
        native.check(host_library, host_library.tpv_rope(native.RopeParams(size, 1, 1, 5)))
