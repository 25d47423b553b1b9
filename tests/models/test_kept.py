"""Matrices that are kept as their checkpoint stores them have the values that they would be dequantised to."""

import pytest
import torch
from harness import SMALL, config_of, one_shot, tokens

from atom_vllm_bridge.checkpoint.make import make
from atom_vllm_bridge.models.deepseek_v4.dspark import DSparkConfig, DSparkDraft
from atom_vllm_bridge.models.deepseek_v4.loading import CheckpointError, iterate, load
from atom_vllm_bridge.models.deepseek_v4.model import DeepseekV4Model
from atom_vllm_bridge.models.deepseek_v4.mtp import MTPDraft
from atom_vllm_bridge.models.deepseek_v4.packing import pack
from atom_vllm_bridge.models.ops import registry
from atom_vllm_bridge.models.ops.registry import Provider
from atom_vllm_bridge.models.ops.triton.hold import hold
from atom_vllm_bridge.models.quantization import block_fp8, mxfp4
from atom_vllm_bridge.models.quantization.kept import Kept
from atom_vllm_bridge.models.quantization.planes import FP8, MXFP4

CPU = torch.device("cpu")
QUANTIZE = {"fp8": block_fp8.quantize, "mxfp4": mxfp4.quantize}
DEQUANTIZE = {"fp8": block_fp8.dequantize, "mxfp4": mxfp4.dequantize}
FORMATS = pytest.mark.parametrize("format", QUANTIZE)


@pytest.fixture
def keeping(monkeypatch):
    """On the CPU, matrices are kept, and ops are torch's; put back afterwards."""
    monkeypatch.setattr(registry, "_providers", dict(registry._providers))
    monkeypatch.setattr(registry, "_choices", {})
    registry.register(
        Provider("keeping", {"hold": hold}.get, lambda device: None),
    )
    registry.configure("keeping,torch")
    yield
    registry.configure("")


def values(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def kept(outputs, inputs, count=None, dtype=torch.float32):
    return Kept(outputs, inputs, count, dtype, CPU)


@pytest.mark.parametrize(("planes", "many"), [(FP8, 256), (MXFP4, 16)])
def test_every_code_keeps_its_bits_in_every_place(planes, many):
    place = torch.arange(2 * planes.step)
    codes = (place + torch.arange(many).unsqueeze(1)) % many
    words = planes.pack(codes)
    assert words.dtype == torch.int32
    assert torch.equal(planes.unpack(words), codes)


@FORMATS
@pytest.mark.parametrize("shape", [(3, 40), (130, 300), (256, 512)], ids=str)
def test_a_quantised_matrix_has_its_values(format, shape):
    w = kept([shape[0]], shape[1])
    pair = QUANTIZE[format](values(*shape) * 0.1)
    w.rows(0, shape[0]).keep(*pair)
    assert w.bands[0].format == format
    assert w.shape == (shape[1], shape[0])
    assert torch.equal(w.plain(torch.float32), DEQUANTIZE[format](*pair).mT)


def test_parts_lie_side_by_side_wherever_they_end():
    w, want = kept([200, 70], 130), []
    for first, rows in ((0, 50), (50, 150)):
        pair = block_fp8.quantize(values(rows, 130, seed=rows))
        w.rows(first, first + rows).keep(*pair)
        want.append(block_fp8.dequantize(*pair))
    want.append(values(70, 130))
    w.rows(200, 270).copy_(want[2])
    assert [band.format for band in w.bands] == ["fp8", "plain"]
    whole = torch.cat(want).mT
    assert torch.equal(w.plain(torch.float32), whole)
    for first, end in ((0, 50), (30, 180), (150, 250), (200, 270)):
        part = w.columns(first, end)
        assert torch.equal(part.plain(torch.float32), whole[:, first:end])


def test_a_part_in_two_bands_is_refused():
    with pytest.raises(ValueError, match="rows 10 to 30 lie in two bands"):
        kept([20, 20], 8).rows(10, 30)


@FORMATS
def test_stacked_matrices_are_those_that_were_stored(format):
    w, want = kept([24], 64, count=3), []
    for e in range(3):
        pair = QUANTIZE[format](values(24, 64, seed=e))
        w.rows(24 * e, 24 * e + 24).keep(*pair)
        want.append(DEQUANTIZE[format](*pair).mT)
    assert w.shape == (3, 64, 24)
    assert torch.equal(w.plain(torch.float32), torch.stack(want))


def test_scales_in_float32_are_kept_where_they_are_powers_of_two():
    q, scale = block_fp8.quantize(values(130, 130), torch.float32)
    for factor, format in ((1.0, "fp8"), (2.0**-100, "fp8"), (1.5, "plain")):
        w = kept([130], 130)
        w.rows(0, 130).keep(q, scale * factor)
        assert w.bands[0].format == format
        want = block_fp8.dequantize(q, scale * factor).mT
        assert torch.equal(w.plain(torch.float32), want)


@FORMATS
def test_what_a_kernel_would_get_wrong_is_dequantised(format):
    q, scale = QUANTIZE[format](values(4, 64))
    byte = scale.view(torch.uint8)
    planes = {"fp8": FP8, "mxfp4": MXFP4}[format]
    for exponent, held in ((1, True), (planes.largest_scale, True), (0, False)):
        w = kept([4], 64)
        w.rows(0, 4).keep(q, torch.full_like(byte, exponent).view(scale.dtype))
        assert (w.bands[0].format == format) is held
    w = kept([4], 64)
    large = torch.full_like(byte, planes.largest_scale + 1).view(scale.dtype)
    w.rows(0, 4).keep(q, large)
    assert w.bands[0].format == "plain"
    assert torch.equal(w.plain(torch.float32), DEQUANTIZE[format](q, large).mT)


def test_an_e4m3_that_is_not_a_number_stays_one():
    q, scale = block_fp8.quantize(values(4, 64))
    q.view(torch.uint8)[1, 2] = 0xFF
    w = kept([4], 64)
    w.rows(0, 4).keep(q, scale)
    found = w.plain(torch.float32).isnan().nonzero()
    assert found.tolist() == [[2, 1]]


def test_one_plain_part_makes_its_band_plain():
    q, scale = mxfp4.quantize(values(8, 64))
    other = values(8, 64, seed=1)
    for order in ((0, 1), (1, 0)):
        w = kept([16], 64)
        for which in order:
            part = w.rows(8 * which, 8 * which + 8)
            part.copy_(other) if which else part.keep(q, scale)
        assert w.bands[0].format == "plain"
        want = torch.cat((mxfp4.dequantize(q, scale), other)).mT
        assert torch.equal(w.plain(torch.float32), want)


def test_memory_that_holds_weights_stays_where_it_is_when_they_come_again():
    w = kept([8], 64)
    part = w.rows(0, 8)
    part.keep(*mxfp4.quantize(values(8, 64)))
    before = w.bands[0].values.data_ptr()
    pair = mxfp4.quantize(values(8, 64, seed=1))
    part.keep(*pair)
    assert w.bands[0].values.data_ptr() == before
    assert torch.equal(w.plain(torch.float32), mxfp4.dequantize(*pair).mT)


def test_a_matrix_that_was_never_filled_says_so():
    with pytest.raises(ValueError, match="before anything was loaded"):
        kept([8], 64).plain(torch.float32)


# The model. Its matrices have sides that are no multiples of a block's.


def directory(tmp_path, layout, draft="none", **overrides):
    return make(
        tmp_path / f"{layout}-{draft}",
        layout=layout,
        draft=draft,
        overrides=SMALL | overrides,
        tokenizer=False,
    )


def filled(path, dtype=torch.float32):
    model = DeepseekV4Model(config_of(path), dtype=dtype)
    wanted = lambda name: not name.startswith("mtp.")  # noqa: E731
    report = load(model.weight_slots(), iterate(path, wanted=wanted, progress=False))
    return model, report


def matrices(module):
    """Every kept matrix below a module, by path."""
    found = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, Kept):
                found[f"{path}.{name}"] = value
    return found


def same_values(keeper, plain):
    found = matrices(keeper)
    for path, w in found.items():
        want = plain.get_parameter(path.removeprefix(".")).data
        if path.endswith("wo_a"):
            want = want.mT
        assert torch.equal(w.plain(want.dtype), want), path
    return found


@pytest.mark.parametrize("layout", ["bf16", "mxfp4", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_that_keeps_is_the_model_that_dequantises(
    layout, dtype, tmp_path, request
):
    path = directory(tmp_path, layout)
    plain, want_report = filled(path, dtype)
    request.getfixturevalue("keeping")
    keeper, report = filled(path, dtype)
    assert vars(report) == vars(want_report)
    found = same_values(keeper, plain)
    assert len(found) == 8 * SMALL["num_hidden_layers"]
    formats = {path.split(".")[-1]: w.bands[0].format for path, w in found.items()}
    experts = {"bf16": "plain", "mxfp4": "mxfp4", "fp8": "fp8"}[layout]
    others = "plain" if layout == "bf16" else "fp8"
    assert formats == dict.fromkeys(
        ("w_in", "wq_b", "wo_a", "wo_b", "shared_w13", "shared_w2"), others
    ) | dict.fromkeys(("w13", "w2"), experts)
    pack(keeper)
    if dtype == torch.float32:
        ids = tokens(90)
        registry.configure("torch")
        want = one_shot(plain, ids)
        assert (one_shot(keeper, ids) - want).abs().max() < 1e-3


def test_what_is_kept_takes_no_more_than_the_checkpoint_and_its_scales(
    keeping, tmp_path
):
    wide = {
        "hidden_size": 256,
        "moe_intermediate_size": 256,
        "q_lora_rank": 128,
        "o_lora_rank": 128,
        "head_dim": 128,
    }
    model, _ = filled(directory(tmp_path, "mxfp4", **wide), torch.bfloat16)
    for path, w in matrices(model).items():
        for band in w.bands:
            held = band.values.nbytes + (
                0 if band.scales is None else band.scales.nbytes
            )
            bits = {"plain": 16, "fp8": 8.25, "mxfp4": 4.25}[band.format]
            assert held * 8 <= band.rows * band.inputs * bits, path


@pytest.mark.parametrize("draft", ["mtp", "dspark"])
def test_a_draft_that_keeps_is_the_draft_that_dequantises(draft, tmp_path, request):
    path = directory(
        tmp_path, "mxfp4", draft, n_mtp_layers=2 if draft == "dspark" else None
    )
    config = config_of(path)
    kind = {"dtype": torch.float32, "device": "cpu", "kv_codec": None}
    plain = build(path, draft, config, kind)
    request.getfixturevalue("keeping")
    keeper = build(path, draft, config, kind)
    found = same_values(keeper, plain)
    own = {"e_proj", "h_proj"} if draft == "mtp" else {"main_proj"}
    assert own <= {name.removeprefix(".") for name in found}


def build(path, draft, config, kind):
    import json

    from atom_vllm_bridge.models.quantization.kv_codecs import kv_codec

    kind = kind | {"kv_codec": kv_codec("auto", torch.float32, config)}
    if draft == "mtp":
        model = MTPDraft(config, **kind)
    else:
        dspark = DSparkConfig.from_hf(json.loads((path / "config.json").read_text()))
        model = DSparkDraft(config, dspark, 2, confidence=True, **kind)
    wanted = lambda name: name.startswith("mtp.")  # noqa: E731
    load(model.weight_slots(), iterate(path, wanted=wanted, progress=False))
    return model


def test_faults_are_those_of_plain_slots(keeping):
    """Every fault of loading, whatever the slot is."""
    fp8, scale8 = block_fp8.quantize(values(200, 130))
    fp4, scale4 = mxfp4.quantize(values(6, 70))
    streams = {
        "missing scale": [("a.weight", fp8)],
        "missing weight": [("a.scale", scale8)],
        "shape": [("a.weight", fp8[:100]), ("a.scale", scale8)],
        "scale shape": [("a.weight", fp8), ("a.scale", scale8[:1])],
        "scale dtype": [("a.weight", fp8), ("a.scale", scale8.float().half())],
        "packed": [("a.weight", fp4), ("a.scale", scale4)],
        "plain shape": [("a.weight", values(3, 3))],
        "plain dtype": [("a.weight", torch.zeros(200, 130, dtype=torch.int64))],
        "left over": [("a.weight", values(200, 130)), ("a.scale", scale8)],
        "twice": [("a.weight", values(200, 130))] * 2,
        "nothing": [],
    }
    for name, stream in streams.items():
        problems = []
        for slot in (torch.zeros(200, 130), kept([200], 130).rows(0, 200)):
            with pytest.raises(CheckpointError) as error:
                load({"a.weight": slot}, stream)
            problems.append(error.value.problems)
        assert problems[0] == problems[1], name
