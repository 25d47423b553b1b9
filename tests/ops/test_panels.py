"""Products with packed matrices equal those with plain ones, whatever the rows, the dtype and the threads."""

import pytest
import torch

from atom_vllm_bridge.models.ops import panels
from atom_vllm_bridge.models.ops.registry import providers_of, resolve_from

LIMIT = 2.0
ROWS = [1, 3, 8, 15, 80]


def draw(*shape, exact=True, seed=0):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return w.bfloat16().float() if exact else w


def packed(w):
    found = resolve_from("numba", "pack")(w)
    assert found is not None
    return found


def close(got, want, tolerance=1e-5):
    assert got.shape == want.shape
    assert (got.float() - want.float()).norm() / want.float().norm() < tolerance


@pytest.mark.parametrize("shape", [(7, 5), (64, 96), (3, 16, 40)], ids=str)
def test_panels_hold_the_columns_in_order(shape):
    w = draw(*shape)
    joined = panels.join(panels.cut(w))
    assert torch.equal(joined[..., : shape[-1]], w)
    assert not joined[..., shape[-1] :].any()


@pytest.mark.parametrize("first", [0, 20, 64])
def test_columns_of_panels_begin_where_they_are_asked_to(first):
    w = draw(16, 100)
    cut = panels.columns(panels.cut(w), first, 90)
    joined = cut if cut.dim() == 2 else panels.join(cut)
    assert torch.equal(joined[:, : 90 - first], panels.columns(w, first, 90))


def test_only_what_bfloat16_holds_exactly_is_narrowed():
    exact, other = draw(8, 64), draw(8, 64, exact=False)
    assert packed(exact).dtype == torch.bfloat16
    assert packed(other).dtype == torch.float32
    assert torch.equal(panels.join(packed(exact)).float(), exact)
    assert torch.equal(panels.join(packed(other)), other)
    assert resolve_from("torch", "pack")(exact) is None


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("provider", providers_of("linear"))
def test_a_packed_matrix_reads_rows_like_a_plain_one(provider, rows, exact):
    x, w = draw(rows, 48, exact=False), draw(48, 104, exact=exact)
    linear = resolve_from(provider, "linear")
    close(linear(x, w), x @ w)
    close(linear(x, packed(w))[:, :104], x @ w)


@pytest.mark.parametrize("provider", providers_of("linear"))
def test_bfloat16_rows_give_bfloat16(provider):
    x, w = draw(4, 64).bfloat16(), draw(64, 32)
    got = resolve_from(provider, "linear")(x, packed(w.bfloat16()))
    assert got.dtype == torch.bfloat16
    close(got, x.float() @ w, 1e-2)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_is_the_same_in_any_company_and_on_any_threads(threads, exact):
    """To the bit: a row's sums are taken in one order, however many inputs there are."""
    before = torch.get_num_threads()
    linear = resolve_from("numba", "linear")
    x, w = draw(13, 300, exact=False), packed(draw(300, 160, exact=exact))
    alone = torch.cat([linear(row, w) for row in x.split(1)])
    close(alone[:, :160], x @ panels.join(w)[:, :160].float())
    try:
        torch.set_num_threads(threads)
        for company in range(2, 14):
            assert torch.equal(linear(x[:company], w), alone[:company])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("rank", [32, 24])
@pytest.mark.parametrize("provider", providers_of("grouped_output_projection"))
def test_packed_groups_project_like_plain_ones(provider, rank, rows):
    o, wo_a, wo_b = draw(rows, 4, 16), draw(2, rank, 32), draw(2 * rank, 40)
    project = resolve_from(provider, "grouped_output_projection")
    want = project(o, wo_a, wo_b)
    close(project(o, packed(wo_a.mT), packed(wo_b))[:, :40], want)


@pytest.mark.parametrize("inner", [32, 24])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("provider", providers_of("feed_forward"))
def test_a_packed_feed_forward_is_that_of_plain_matrices(provider, rows, inner):
    x, w13, w2 = draw(rows, 64, exact=False), draw(64, 2 * inner), draw(inner, 64)
    feed_forward = resolve_from(provider, "feed_forward")
    gate, up = (x @ w13).split(inner, -1)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    want = (gate * gate.sigmoid() * up) @ w2
    close(feed_forward(x, w13, w2, LIMIT), want)
    close(feed_forward(x, packed(w13), packed(w2), LIMIT), want)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("inner", [32, 24])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("provider", providers_of("experts"))
def test_packed_experts_answer_like_plain_ones(provider, rows, inner, exact):
    g = torch.Generator().manual_seed(1)
    x = draw(rows, 64, exact=False)
    w13, w2 = draw(6, 64, 2 * inner, exact=exact), draw(6, inner, 64, exact=exact)
    # A table of a hash layer may name an expert twice.
    chosen = torch.randint(0, 6, (rows, 3), generator=g)
    weights = torch.rand(rows, 3, generator=g)
    want = resolve_from("torch", "experts")(x, chosen, weights, w13, w2, LIMIT)
    got = resolve_from(provider, "experts")(
        x, chosen, weights, packed(w13), packed(w2), LIMIT
    )
    close(got, want)


def test_experts_clamp_alike_whatever_the_default_dtype_of_their_first_call():
    """vLLM loads a model, and calls it for the first time, with the model's dtype as the default one."""
    x, w13, w2 = draw(2, 64), draw(6, 64, 64), draw(6, 32, 64)
    chosen, weights = torch.tensor([[0, 5], [3, 3]]), torch.ones(2, 2)
    # A limit that no other test has asked for.
    given = (x, chosen, weights, packed(w13), packed(w2), 0.4375)
    want = resolve_from("torch", "experts")(*given)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = resolve_from("numba", "experts")(*given)
    finally:
        torch.set_default_dtype(before)
    close(got, want)
