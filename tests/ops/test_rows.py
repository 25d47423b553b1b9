"""gather_rows and write_rows over every layout that a cache may have."""

import pytest
import torch

from atom_vllm_bridge.models.ops.registry import providers_of, resolve_from
from atom_vllm_bridge.models.ops.rows import flat_rows, pitch

BLOCKS, COUNT, WIDTH = 5, 4, 6


def layouts(dtype=torch.float32):
    """Caches of the same shape: alone, beside another layer's, and at a stride that is not a number of rows."""

    def filled(*shape):
        values = torch.arange(torch.Size(shape).numel()) % 113
        return values.view(shape).to(dtype)

    yield "alone", filled(BLOCKS, COUNT, WIDTH)
    yield "beside", filled(BLOCKS, 3, COUNT, WIDTH)[:, 1]
    odd = filled(BLOCKS, COUNT * WIDTH + 5)
    yield "odd", odd[:, 2 : 2 + COUNT * WIDTH].unflatten(1, (COUNT, WIDTH))
    yield "one block", filled(1, COUNT, WIDTH)


LAYOUTS = [name for name, _ in layouts()]


def ids_of(rows, places):
    return torch.tensor(
        [-1 if p is None else p[0] * pitch(rows) + p[1] for p in places]
    )


def test_only_an_odd_stride_has_no_list():
    assert {name for name, rows in layouts() if flat_rows(rows) is None} == {"odd"}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("provider", providers_of("gather_rows"))
def test_gather_reads_block_and_row(provider, name):
    rows = dict(layouts())[name]
    last = rows.shape[0] - 1
    places = [(0, 0), (last, 3), (last, 0), (0, 2), (last, 3), (0, 1)]
    ids = ids_of(rows, places).view(2, 3)
    got = resolve_from(provider, "gather_rows")(rows, ids)
    want = torch.stack([rows[b, r] for b, r in places]).view(2, 3, WIDTH)
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("provider", providers_of("write_rows"))
def test_write_changes_named_rows_and_nothing_else(provider, name, dtype):
    rows = dict(layouts(dtype))[name]
    last = rows.shape[0] - 1
    places = [None, (last, 3), (last, 1), None, (0, 2)]
    values = torch.arange(5 * WIDTH).view(5, WIDTH).to(dtype) + 100
    memory = torch.empty(0, dtype=dtype).set_(rows.untyped_storage())
    before = memory.clone()
    want = rows.clone()
    for place, value in zip(places, values, strict=True):
        if place is not None:
            want[place] = value
    resolve_from(provider, "write_rows")(rows, ids_of(rows, places), values)
    assert torch.equal(rows, want)
    assert (memory != before).sum() <= 3 * WIDTH


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("provider", providers_of("write_rows"))
def test_padding_writes_nothing_even_over_nan(provider, name):
    rows = dict(layouts())[name]
    rows[0, 0] = torch.nan
    memory = torch.empty(0).set_(rows.untyped_storage()).view(torch.int32)
    before = memory.clone()
    resolve_from(provider, "write_rows")(
        rows, torch.full((3,), -1), torch.ones(3, WIDTH)
    )
    assert torch.equal(memory, before)
