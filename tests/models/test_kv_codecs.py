"""Rows through a codec and back: what is kept, what it costs, where bytes lie."""

import pytest
import torch

from atom_vllm_bridge.models.quantization.kv_codecs import (
    fp8_ds_mla,
    fp8_row,
    kv_codec,
    raw,
)


class Dims:
    head_dim, qk_rope_head_dim, index_head_dim = 512, 64, 128


def values(*shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    magnitude = torch.exp2(
        torch.randint(-20, 12, (*shape[:-1], 1), generator=g).float()
    )
    return torch.randn(shape, generator=g) * magnitude


def test_published_widths():
    codec = kv_codec("fp8", torch.bfloat16, Dims())
    assert (codec.kv.width, codec.index.width) == (584, 132)
    assert codec.kv.dtype == codec.index.dtype == torch.uint8
    assert codec.name == "fp8_ds_mla"


@pytest.mark.parametrize(
    ("name", "model", "stored"),
    [
        ("auto", torch.float32, torch.float32),
        ("auto", torch.bfloat16, torch.bfloat16),
        ("bfloat16", torch.float32, torch.bfloat16),
        ("bf16", torch.float32, torch.bfloat16),
    ],
)
def test_raw_rows_are_rounded_to_their_dtype(name, model, stored):
    codec = kv_codec(name, model, Dims())
    x = values(6, 512)
    rows = codec.kv.encode(x)
    assert rows.dtype == stored
    assert rows.shape == (6, codec.kv.width)
    assert torch.equal(codec.kv.decode(rows), x.to(stored).float())


def test_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="'int4' is not on offer"):
        kv_codec("int4", torch.float32, Dims())


@pytest.mark.parametrize(("dim", "rope"), [(512, 64), (32, 8), (128, 64), (200, 32)])
def test_fp8_rows_are_within_the_stated_error(dim, rope):
    codec = fp8_ds_mla(dim, rope)
    x = values(64, dim)
    x[0] = 0
    back = codec.decode(codec.encode(x))
    nope = dim - rope
    for first in range(0, nope, 64):
        tile = x[:, first : min(first + 64, nope)]
        amax = tile.abs().amax(-1, keepdim=True).clamp(min=1e-4)
        scale = torch.exp2(torch.ceil(torch.log2(amax.double() / 448))).float()
        bound = torch.maximum(tile.abs() / 16, scale / 1024)
        error = (back[:, first : first + tile.shape[1]] - tile).abs()
        assert (error <= bound * (1 + 1e-6)).all()
    assert (back[:, nope:] - x[:, nope:]).abs().le(x[:, nope:].abs() / 256).all()
    assert torch.equal(back[0], x[0])


def test_fp8_bytes_lie_as_documented():
    codec = fp8_ds_mla(512, 64)
    x = torch.zeros(1, 512)
    x[0, 0], x[0, 70], x[0, 447], x[0, 448], x[0, 511] = 448.0, 3.5, 1.0, 1.5, -2.0
    row = codec.encode(x)[0]
    e4m3 = row[:448].view(torch.float8_e4m3fn).float()
    assert e4m3[0] == 448.0
    scale = [2.0 ** (int(b) - 127) for b in row[576:583]]
    assert scale[0] == 1.0
    assert scale[1] == 2.0**-7  # 3.5 / 448 = 2^-7 exactly
    assert e4m3[70] * scale[1] == 3.5
    assert e4m3[447] * scale[6] == 1.0
    assert row[448:576].clone().view(torch.bfloat16)[[0, 63]].tolist() == [1.5, -2.0]
    assert int(row[583]) == 0


def test_scales_are_rounded_up_so_that_nothing_saturates():
    codec = fp8_row(128)
    x = torch.full((1, 128), 448.0 * 1.0001)
    scale = codec.encode(x)[0, 128:].view(torch.float32)
    assert scale.item() == 2.0
    assert codec.decode(codec.encode(x)).max() == 448.0


def test_index_rows_are_within_the_stated_error():
    codec = fp8_row(128)
    x = values(200, 128)
    back = codec.decode(codec.encode(x))
    scale = codec.encode(x)[:, 128:].contiguous().view(torch.float32)
    assert torch.equal(scale, torch.exp2(torch.log2(scale).round()))
    bound = torch.maximum(x.abs() / 16, scale / 1024)
    assert ((back - x).abs() <= bound * (1 + 1e-6)).all()


def test_rows_decode_from_the_middle_of_a_strided_cache():
    codec = fp8_ds_mla(512, 64)
    x = values(5, 512)
    memory = torch.full((5, 3, 600), 0xFF, dtype=torch.uint8)
    memory[:, 1, 8 : 8 + 584] = codec.encode(x)
    rows = memory[:, 1, 8 : 8 + 584]
    assert torch.equal(codec.decode(rows), codec.decode(codec.encode(x)))


def test_raw_width_is_the_dimension():
    assert raw(40, torch.float32).width == 40
