"""The small steps of a layer that run as one: each equals the steps one after the other."""

import pytest
import torch

from atom_vllm_bridge.models.ops.registry import providers_of, resolve_from
from atom_vllm_bridge.models.ops.torch.hc_pre import hc_pre
from atom_vllm_bridge.models.ops.torch.rms_norm import rms_norm
from atom_vllm_bridge.models.ops.torch.rope import rope
from atom_vllm_bridge.models.quantization.kv_codecs import RowCodec, raw

EPS = 1e-6


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rotation(tokens, pairs=2):
    return torch.polar(torch.ones(tokens, pairs), draw(tokens, pairs, seed=5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16, None], ids=str)
@pytest.mark.parametrize("provider", providers_of("write_keys"))
def test_a_stored_key_is_normed_rotated_and_encoded(provider, storage, dtype):
    """Storage None: rows of another width and meaning, as a codec makes them."""

    def encode(values):
        if storage is not None:
            return values.to(storage)
        return values.mul(16).round().to(torch.int8).view(torch.uint8)[..., :6]

    x, weight = draw(4, 16).to(dtype)[:, 4:12], draw(8, seed=1)
    turn, ids = rotation(4), torch.tensor([7, -1, 0, 12])
    own = RowCodec("own", 8, 0, 6, torch.uint8, encode, torch.Tensor.float)
    codec = raw(8, storage) if storage else own
    rows = torch.full((3, 5, codec.width), 77, dtype=codec.dtype)
    want = rows.clone()
    key = encode(rope(rms_norm(x.float(), weight, EPS), turn))
    for i, where in enumerate(ids.tolist()):
        if where >= 0:
            want.view(15, -1)[where] = key[i]
    resolve_from(provider, "write_keys")(x, weight, EPS, turn, rows, ids, codec)
    if storage is None:
        assert (rows.int() - want.int()).abs().max() <= 1
    else:
        tolerance = 1e-6 if storage == torch.float32 else 1e-2
        torch.testing.assert_close(rows, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1 + 2**-8, 3.4e38])
@pytest.mark.parametrize("provider", providers_of("write_keys"))
def test_bfloat16_keys_are_rounded_as_torch_rounds(provider, value):
    rows = torch.zeros(1, 2, 6, dtype=torch.bfloat16)
    x = torch.ones(1, 6)
    weight = torch.tensor([value, 1.0, -value, 1 + 3 * 2**-8, 1.0, 1.0])
    still = torch.ones(1, 1, dtype=torch.complex64)
    resolve_from(provider, "write_keys")(
        x, weight, 0.0, still, rows, torch.tensor([1]), raw(6, torch.bfloat16)
    )
    torch.testing.assert_close(rows[0, 1], weight.bfloat16(), equal_nan=True)
    assert not rows[0, 0].any()


@pytest.mark.parametrize("tokens", [1, 5, 100])
@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("provider", providers_of("query_heads"))
def test_each_head_of_a_query_is_normed_and_rotated(provider, dtype, turned, tokens):
    x = draw(tokens, 24).to(dtype)
    turn = rotation(tokens) if turned else None
    want = rms_norm(x.float().view(tokens, 3, 8), None, EPS)
    want = rope(want, turn) if turned else want
    got = resolve_from(provider, "query_heads")(x, 3, EPS, turn)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("provider", providers_of("write_inputs"))
def test_only_the_score_gets_the_bias_of_its_place(provider, dtype):
    inputs, ape = draw(4, 20).to(dtype)[:, 6:18], draw(4, 6, seed=1)
    phase, ids = torch.tensor([3, 0, 1, 2]), torch.tensor([2, -1, 9, 0])
    rows = torch.full((2, 5, 12), torch.nan)
    want = rows.clone()
    for t, where in enumerate(ids.tolist()):
        if where >= 0:
            want.view(10, 12)[where, :6] = inputs[t, :6].float()
            want.view(10, 12)[where, 6:] = inputs[t, 6:].float() + ape[phase[t]]
    resolve_from(provider, "write_inputs")(inputs.clone(), ape, phase, rows, ids)
    torch.testing.assert_close(rows, want, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("provider", providers_of("hc_pre"))
def test_the_norm_of_a_block_may_come_with_the_read(provider, dtype):
    streams = draw(3, 4, 8).to(dtype)
    weights = (draw(24, 32, seed=1), draw(24, seed=2), draw(3, seed=3))
    weight = draw(8, seed=4)
    y, post, comb = hc_pre(streams, *weights, 4, 1e-6, EPS)
    got = resolve_from(provider, "hc_pre")(streams, *weights, 4, 1e-6, EPS, weight)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    want = rms_norm(y, weight, EPS)
    torch.testing.assert_close(got[0], want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got[1:], (post, comb), rtol=1e-4, atol=1e-5)
