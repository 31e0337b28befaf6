"""What lies between the products of an MLA layer, on the CPU: against float64, and as operators of a compiled graph."""

import pytest
import torch
from mla_rows import Rows

from tpverify.errors import ArgumentError
from tpverify.ops.mla import rope_cache

SMALL = {"hidden": 48, "low": 24, "nope": 12, "rank": 32, "rope": 8, "dtype": torch.float32}


@pytest.mark.parametrize("size", [1.0, 1e-3, 30.0])
@pytest.mark.parametrize(("n", "shards", "heads"), [(1, 1, 1), (5, 2, 3), (33, 8, 2)])
def test_rope_cache_is_two_norms_and_a_rotation(n, shards, heads, size):
    rows = Rows(n, shards, heads, **SMALL, size=size, spare=8)
    rope_cache(*rows.arguments())
    rows.check(1e-5)
    rows.check_untouched()


def test_a_rows_bits_are_its_own():
    """Whatever rows and heads are beside it."""
    all_rows, some = Rows(9, 4, 2, **SMALL), Rows(9, 4, 2, **SMALL)
    rope_cache(*all_rows.arguments())
    x, down, queries, rotation, slots, nope, q, pool, *eps = some.arguments()
    part, shards = slice(3, 5), slice(1, 3)
    nope, q = nope[shards, part].clone(), q[part, 2:6].clone()
    rope_cache(x[part], down[part], queries[shards, part], rotation[part], slots[part], nope, q, pool, *eps)
    assert torch.equal(nope, all_rows.nope[shards, part])
    assert torch.equal(q[..., 32:], all_rows.q[part, 2:6, 32:])
    assert torch.equal(pool[slots[part]], all_rows.pool[all_rows.slots[part]])


@pytest.mark.parametrize(
    ("index", "shape", "argument"),
    [
        (1, (5, 40), "down"), (1, (4, 64), "down"), (2, (2, 4, 3, 20), "queries"), (2, (2, 5, 3, 8), "queries"),
        (3, (5, 4, 1), "rotation"), (4, (6,), "slots"), (5, (2, 5, 3, 13), "nope"), (6, (5, 5, 40), "q"),
    ],
)  # fmt: skip
def test_shapes_that_do_not_fit_are_refused(index, shape, argument):
    arguments = list(Rows(5, 2, 3, **SMALL).arguments())
    arguments[index] = torch.zeros(shape)
    with pytest.raises(ArgumentError) as error:
        rope_cache(*arguments)
    assert error.value.argument == argument


@pytest.mark.parametrize(
    ("index", "value", "said"),
    [
        (0, torch.zeros(5), "^x: expected 2 axes"), (2, torch.zeros(5, 3, 20), "^queries: expected 4 axes"),
        (7, torch.zeros(8), "^pool: expected 2 axes"), (4, torch.zeros(5).int(), "^slots: expected int64"),
        (3, torch.zeros(5, 4, 2).double(), "^rotation: expected float32"),
    ],
)  # fmt: skip
def test_what_is_no_such_tensor_is_refused_by_name(index, value, said):
    arguments = list(Rows(5, 2, 3, **SMALL).arguments())
    arguments[index] = value
    with pytest.raises(ArgumentError, match=said):
        rope_cache(*arguments)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_whole(backend):
    def between(*arguments):
        rope_cache(*arguments)
        return arguments[5] + 1

    torch._dynamo.reset()
    rows = Rows(5, 2, 3, **SMALL)
    found = torch.compile(between, backend=backend, fullgraph=True)(*rows.arguments())
    rows.check(1e-5)
    assert torch.equal(found, rows.nope + 1)
