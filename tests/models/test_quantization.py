"""Block fp8 and mxfp4 against their definitions, value by value."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atom_vllm_bridge.models.quantization import block_fp8, e8m0, mxfp4

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e4m3(byte: int) -> float:
    """The definition: sign, four exponent bits (bias 7), three mantissa bits."""
    sign, exponent, mantissa = byte >> 7, (byte >> 3) & 15, byte & 7
    if exponent == 0:
        value = mantissa / 8 * 2.0**-6
    else:
        value = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


def nearest_even(value: float, grid: list[float]) -> float:
    """The nearest of an ascending grid; of two equally near the one with an even index."""
    index = min(range(len(grid)), key=lambda i: (abs(grid[i] - abs(value)), i % 2))
    return math.copysign(grid[index], value)


def matrices(largest_rows: int, largest_columns: int):
    """Random [out, in] with even `in`, and magnitudes that differ from block to block."""
    return st.builds(
        make_matrix,
        st.integers(1, largest_rows),
        st.integers(1, largest_columns // 2).map(lambda half: 2 * half),
        st.integers(0, 2**31),
        st.integers(-30, 30),
    )


def make_matrix(rows: int, columns: int, seed: int, magnitude: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randint(-8, 8, (rows, columns), generator=generator)
    noise = torch.randn(rows, columns, generator=generator)
    return noise * torch.exp2(spread.float() + magnitude)


def test_every_e8m0_byte_is_a_power_of_two():
    values = e8m0.decode(
        torch.arange(255, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    )
    assert values.tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    exponents = torch.arange(-127, 128)
    assert torch.equal(
        e8m0.encode(exponents).view(torch.uint8), torch.arange(255, dtype=torch.uint8)
    )


@pytest.mark.parametrize("largest", [block_fp8.LARGEST, mxfp4.LARGEST])
def test_the_scale_is_the_smallest_that_does_not_saturate(largest):
    exact = torch.tensor([largest * 2.0**k for k in (-20, -1, 0, 5)])
    above = torch.nextafter(exact, torch.tensor(torch.inf))
    assert e8m0.fitting_exponent(exact, largest).tolist() == [-20, -1, 0, 5]
    assert e8m0.fitting_exponent(above, largest).tolist() == [-19, 0, 1, 6]
    assert e8m0.fitting_exponent(torch.zeros(1), largest).item() == 0


def test_every_fp8_code_dequantises_to_its_definition():
    codes = [byte for byte in range(256) if byte & 0x7F != 0x7F]
    q = torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e4m3fn)[None]
    scale = torch.tensor([[2.0**-3, 2.0**9]])
    values = block_fp8.dequantize(q, scale)
    expected = [e4m3(b) * (2.0**-3 if i < 128 else 2.0**9) for i, b in enumerate(codes)]
    assert values[0].tolist() == expected


def test_every_fp4_byte_dequantises_low_nibble_first():
    packed = torch.arange(256, dtype=torch.uint8).view(torch.int8).view(16, 16)
    scale = torch.tensor([2.0**k for k in range(-8, 8)])[:, None]
    values = mxfp4.dequantize(packed, scale.to(torch.float8_e8m0fnu))
    signed = E2M1 + [-v for v in E2M1]
    for byte in range(256):
        row, column = divmod(byte, 16)
        low, high = signed[byte & 15], signed[byte >> 4]
        factor = 2.0 ** (row - 8)
        assert values[row, 2 * column : 2 * column + 2].tolist() == [
            low * factor,
            high * factor,
        ]


def test_fp4_ties_go_to_the_even_code():
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    row = torch.tensor([[*ties, 6.0, *(-t for t in ties), -6.0]])
    values = mxfp4.dequantize(*mxfp4.quantize(row))
    even = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert values[0].tolist() == even + [-v for v in even]


@settings(max_examples=25, deadline=None)
@given(matrices(8, 100))
def test_fp4_rounds_every_element_to_the_nearest_of_its_group(weight):
    packed, scale = mxfp4.quantize(weight)
    assert packed.shape == (weight.shape[0], weight.shape[1] // 2)
    assert scale.shape == mxfp4.scale_shape(*weight.shape)
    values, factors = mxfp4.dequantize(packed, scale), e8m0.decode(scale)
    for i, row in enumerate(weight.tolist()):
        for j, value in enumerate(row):
            factor = factors[i, j // 32].item()
            assert abs(value) <= 6 * factor
            assert values[i, j].item() == nearest_even(value / factor, E2M1) * factor


@settings(max_examples=15, deadline=None)
@given(matrices(140, 300))
def test_fp8_rounds_every_element_to_the_nearest_of_its_block(weight):
    q, scale = block_fp8.quantize(weight)
    assert q.shape == weight.shape
    assert scale.shape == block_fp8.scale_shape(*weight.shape)
    grid = torch.tensor([e4m3(byte) for byte in range(127)], dtype=torch.float64)
    factors = e8m0.decode(scale).double()
    factors = factors.repeat_interleave(128, 0).repeat_interleave(128, 1)
    factors = factors[: weight.shape[0], : weight.shape[1]]
    scaled = (weight.double() / factors).abs()
    assert scaled.max() <= 448
    error = (block_fp8.dequantize(q, scale).double() / factors).abs() - scaled
    above = torch.searchsorted(grid, scaled).clamp(max=126)
    nearest = torch.minimum(grid[above] - scaled, scaled - grid[(above - 1).clamp(0)])
    assert torch.equal(error.abs(), nearest.abs())


@settings(max_examples=20, deadline=None)
@given(matrices(140, 300))
def test_what_was_dequantised_quantises_to_itself(weight):
    for module in (block_fp8, mxfp4):
        values = module.dequantize(*module.quantize(weight))
        assert torch.equal(values, values.to(torch.bfloat16).float())
        assert torch.equal(module.dequantize(*module.quantize(values)), values)


def test_float32_scales_hold_the_same_values_as_e8m0():
    weight = make_matrix(200, 300, 1, 0)
    q, scale = block_fp8.quantize(weight)
    q32, scale32 = block_fp8.quantize(weight, torch.float32)
    assert (scale.dtype, scale32.dtype) == (torch.float8_e8m0fnu, torch.float32)
    assert torch.equal(q.view(torch.uint8), q32.view(torch.uint8))
    assert torch.equal(
        block_fp8.dequantize(q, scale), block_fp8.dequantize(q32, scale32)
    )


def test_a_float32_scale_need_not_be_a_power_of_two():
    q = torch.full((2, 130), 3.0).to(torch.float8_e4m3fn)
    values = block_fp8.dequantize(q, torch.tensor([[0.3, 0.7]]))
    assert torch.equal(values[:, :128], torch.tensor(3.0) * torch.full((2, 128), 0.3))
    assert torch.equal(values[:, 128:], torch.tensor(3.0) * torch.full((2, 2), 0.7))


def test_zeros_stay_zeros_with_scale_one():
    for module in (block_fp8, mxfp4):
        q, scale = module.quantize(torch.zeros(3, 34))
        assert e8m0.decode(scale).unique().tolist() == [1.0]
        assert not module.dequantize(q, scale).any()


def test_a_scale_of_another_shape_is_refused():
    q, scale = block_fp8.quantize(torch.ones(129, 128))
    with pytest.raises(
        ValueError, match=r"scale is \[1, 1\], expected \[2, 1\] \(one scale for 128 × "
    ):
        block_fp8.dequantize(q, scale[:1])
    packed, scale = mxfp4.quantize(torch.ones(2, 66))
    with pytest.raises(
        ValueError, match=r"scale is \[2, 2\], expected \[2, 3\] \(one scale for 32 inp"
    ):
        mxfp4.dequantize(packed, scale[:, :2])
