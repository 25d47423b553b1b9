"""KV rows in ATOM's two buffers: their bytes, and the way from and to this project's rows."""

import pytest
import torch

from atom_vllm_bridge.models.quantization import two_buffer
from atom_vllm_bridge.models.quantization.fnuz import halved
from atom_vllm_bridge.models.quantization.kv_codecs import fp8_ds_mla
from atom_vllm_bridge.models.quantization.two_buffer import Rows

DIM, ROPE = 512, 64
FP8 = pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])


def values(rows, seed=0):
    g = torch.Generator().manual_seed(seed)
    size = torch.exp2(torch.randint(-20, 9, (rows, DIM // 64, 1), generator=g).float())
    return (torch.randn(rows, DIM // 64, 64, generator=g) * size).view(rows, DIM)


def bytes_of(row):
    return row.contiguous().view(torch.uint8).tolist()


def test_a_row_byte_by_byte():
    x = torch.zeros(1, DIM)
    x[0, 0], x[0, 1], x[0, 63] = 448.0, -1.0, 0.5  # scale 1
    x[0, 64], x[0, 65] = 1000.0, -16.0  # 1000 / 448 → scale 4: 250 → 256, and −4
    x[0, 447] = 2**-3  # 2^-3 / 448 → scale 2^-11: 256
    x[0, 448], x[0, 511] = 1.5, -2.0
    rows = two_buffer.encode(x, ROPE)
    nope, rope = bytes_of(rows.nope[0]), bytes_of(rows.rope[0])
    assert (len(nope), len(rope)) == (512, 128)
    # e4m3: sign, four bits of exponent with bias 7, three of fraction.
    expected = [0] * 448
    expected[0], expected[1], expected[63] = 0x7E, 0xB8, 0x30
    expected[64], expected[65], expected[447] = 0x78, 0xC8, 0x78
    assert nope[:448] == expected
    # E8M0: exponent with bias 127. A tile of zeros has the least scale, 2^-13 ≥ 10⁻⁴.
    least = 127 - 13
    scales = [127, 129, *[least] * 4, 127 - 11]
    assert nope[448:462] == [s for s in scales for _ in range(2)]
    assert nope[462:] == [0] * 50
    assert rope == [0xC0, 0x3F, *[0] * 124, 0x00, 0xC0]
    assert two_buffer.decode(rows)[0, 64] == 1024.0


def test_a_row_of_fnuz_byte_by_byte():
    x = torch.zeros(1, DIM)
    x[0, 0], x[0, 1] = 240.0, -1.0
    rows = two_buffer.encode(x, ROPE, torch.float8_e4m3fnuz)
    nope = bytes_of(rows.nope[0])
    # The bias is 8.
    assert nope[:2] == [0x7F, 0xC0]
    assert nope[448:450] == [127, 127]
    assert two_buffer.decode(rows)[0, :2].tolist() == [240.0, -1.0]


@FP8
def test_the_scale_is_the_least_power_of_two_that_fits(fp8):
    x = values(64)
    rows = two_buffer.encode(x, ROPE, fp8)
    exponent = rows.nope.view(torch.uint8)[:, 448:462:2].int() - 127
    amax = x[:, :448].view(64, 7, 64).abs().amax(2)
    least = (amax.double() / torch.finfo(fp8).max).clamp(min=1e-4)
    assert torch.equal(exponent, least.log2().ceil().int())
    assert (two_buffer.decode(rows) - x).abs().max() <= x.abs().max() / 16


@FP8
def test_what_a_row_holds_is_exact_in_bfloat16_and_stored_again_as_it_is(fp8):
    once = two_buffer.decode(two_buffer.encode(values(64), ROPE, fp8))
    assert torch.equal(once.bfloat16().float(), once)
    assert torch.equal(two_buffer.decode(two_buffer.encode(once, ROPE, fp8)), once)


@FP8
def test_rows_of_fp8_ds_mla_keep_their_values(fp8):
    x = values(64)
    x[:, 5] = -0.0
    codec = fp8_ds_mla(DIM, ROPE)
    stored = codec.encode(x)
    rows = two_buffer.from_ds_mla(stored, DIM, ROPE, fp8)
    assert torch.equal(two_buffer.decode(rows), codec.decode(stored))
    assert rows.nope.dtype == fp8


def test_the_way_back_gives_every_byte():
    stored = fp8_ds_mla(DIM, ROPE).encode(values(64))
    rows = two_buffer.from_ds_mla(stored, DIM, ROPE)
    assert torch.equal(two_buffer.to_ds_mla(rows), stored)
    made = two_buffer.encode(values(64, seed=1), ROPE)
    again = two_buffer.from_ds_mla(two_buffer.to_ds_mla(made), DIM, ROPE)
    assert bytes_of(again.nope) == bytes_of(made.nope)
    assert torch.equal(again.rope, made.rope)


def test_every_code_means_half_in_fnuz():
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes & 0x7F != 0x7F]
    whole = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(2 * halved(codes).float(), whole)


def test_rows_without_an_exact_form_are_refused():
    rows = two_buffer.encode(values(1), ROPE, torch.float8_e4m3fnuz)
    with pytest.raises(ValueError, match="no exact form in fp8_ds_mla"):
        two_buffer.to_ds_mla(rows)
    with pytest.raises(ValueError, match="whole tiles of 64"):
        two_buffer.encode(torch.zeros(1, 100), 16)
    with pytest.raises(ValueError, match="whole tiles of 64"):
        two_buffer.decode(Rows(torch.zeros(1, 324), torch.zeros(1, 4)))
