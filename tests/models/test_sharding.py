"""A model that is cut among ranks is the model: its parts make up every published tensor, and together they give its logits."""

import re
from dataclasses import dataclass

import pytest
import torch
from harness import Runner, checkpoint, config_of, model, tokens
from ranks import at_once, ranks
from test_kept import keeping  # noqa: F401

from atom_vllm_bridge.checkpoint.presets import build_config
from atom_vllm_bridge.models.deepseek_v4.checkpoint import tensor_table
from atom_vllm_bridge.models.deepseek_v4.config import DeepseekV4Config
from atom_vllm_bridge.models.deepseek_v4.dspark import DSparkConfig, DSparkDraft
from atom_vllm_bridge.models.deepseek_v4.loading import CheckpointError, iterate, load
from atom_vllm_bridge.models.deepseek_v4.model import DeepseekV4Model
from atom_vllm_bridge.models.deepseek_v4.packing import pack
from atom_vllm_bridge.models.deepseek_v4.parallel import Parallel
from atom_vllm_bridge.models.deepseek_v4.sharding import Cut, Elsewhere
from atom_vllm_bridge.models.quantization import block_fp8, mxfp4
from atom_vllm_bridge.models.quantization.kv_codecs import kv_codec

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    """A checkpoint of harness.SMALL, and among how many ranks it is cut."""

    layout: str = "bf16"
    size: int = 2
    replicas: int = 1
    # At 256 the shared expert divides in blocks of scales.
    inner: int = 32
    vocabulary: int = 160
    tied: bool = False

    @property
    def directory(self):
        return checkpoint(
            layout=self.layout,
            moe_intermediate_size=self.inner,
            vocab_size=self.vocabulary,
            tie_word_embeddings=self.tied,
        )


CASES = [
    Case(),
    Case(vocabulary=161, inner=256),
    Case(tied=True),
    Case("mxfp4", inner=256),
    Case("fp8", inner=256),
    Case(size=1, replicas=2),
    Case(size=1, replicas=3, inner=256),
    Case(size=2, replicas=2, inner=256),
]


def part(directory, parallel):
    """One rank's model, and what its load did."""
    small = DeepseekV4Model(
        config_of(directory), dtype=torch.float32, parallel=parallel
    )
    report = load(small.weight_slots(), iterate(directory, progress=False))
    pack(small)
    return small, report


def logits_of(small, ids):
    """In a chunk that ends within an entry, and a step of one token."""
    runner = Runner(small, {0: ids}, len(ids))
    runner.step([(0, 0, len(ids) - 1)])
    runner.step([(0, len(ids) - 1, 1)])
    return runner.logits[0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_together_give_the_logits_of_the_whole(case):
    # Each replica has a sequence of its own, of another length.
    sequences = [tokens(150 - 17 * r, seed=r) for r in range(case.replicas)]
    whole = model(case.directory)

    def run(parallel):
        small, report = part(case.directory, parallel)
        return logits_of(small, sequences[parallel.replica]), report

    everyone = ranks(case.size, case.replicas)
    for parallel, (logits, report) in zip(
        everyone, at_once(run, everyone), strict=True
    ):
        want = logits_of(whole, sequences[parallel.replica])
        assert (logits - want).norm() <= TOLERANCE * want.norm()
        config, holders = whole.config, case.size * case.replicas
        others = config.n_routed_experts * (holders - 1) // holders
        each = 3 * (1 if case.layout == "bf16" else 2)
        assert len(report.elsewhere) == config.num_hidden_layers * others * each
        assert all(".ffn.experts." in name for name in report.elsewhere)


def test_ranks_agree_to_the_bit():
    """Else they would sample, and draft, different tokens."""
    ids = tokens(140)

    def run(parallel):
        return logits_of(part(checkpoint(), parallel)[0], ids)

    one, other = at_once(run, ranks(2))
    assert torch.equal(one, other)


@pytest.mark.parametrize("layout", ["mxfp4", "fp8"])
def test_kept_parts_have_the_values_of_the_kept_whole(layout, keeping):  # noqa: F811
    """A GPU's form of weights, in both cases: cut between blocks of scales, and within one."""
    directory = Case(layout, inner=256).directory
    ids = tokens(90)

    def run(parallel):
        small, _ = part(directory, parallel)
        return small, logits_of(small, ids)

    (whole, want), *_ = at_once(run, ranks(1))
    parts = at_once(run, ranks(2))
    for small, logits in parts:
        assert (logits - want).norm() <= TOLERANCE * want.norm()
        ffn = small.layers[2].ffn
        assert ffn.w13.bands[0].format == ("mxfp4" if layout == "mxfp4" else "fp8")
        assert ffn.shared_w13.bands[0].format == "fp8"
    one, two = (small.layers[2] for small, _ in parts)
    layer = whole.layers[2]
    for name in ("w13", "w2"):
        both = [getattr(half.ffn, name).plain(torch.float32) for half in (one, two)]
        want = getattr(layer.ffn, name).plain(torch.float32)
        assert torch.equal(torch.cat(both), want)
    down = [half.ffn.shared_w2.plain(torch.float32) for half in (one, two)]
    assert torch.equal(torch.cat(down), layer.ffn.shared_w2.plain(torch.float32))
    low = [half.attn.wo_b.plain(torch.float32) for half in (one, two)]
    assert torch.equal(torch.cat(low), layer.attn.wo_b.plain(torch.float32))


def test_a_missing_part_of_this_rank_is_named_and_another_ranks_is_not():
    directory, parallel = checkpoint(), ranks(2)[0]
    small = DeepseekV4Model(
        config_of(directory), dtype=torch.float32, parallel=parallel
    )
    missing = {f"layers.0.ffn.experts.{e}.w1.weight" for e in (5, 6)}
    with pytest.raises(CheckpointError) as caught:
        load(
            small.weight_slots(),
            iterate(directory, wanted=lambda n: n not in missing, progress=False),
        )
    (problem,) = caught.value.problems
    assert problem.startswith("layers.0.ffn.experts.5.w1.weight is missing")


FLASH = {"preset": "flash-shaped", "layers": 4}
PRO = FLASH | {
    "overrides": {
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "o_groups": 16,
        "q_lora_rank": 1536,
        "n_routed_experts": 384,
        "moe_intermediate_size": 3072,
        "index_topk": 1024,
        "dspark_markov_rank": 512,
    }
}


def slots_of(hf, parallel):
    """Of target and draft, without memory."""
    config, dspark = DeepseekV4Config.from_hf(hf), DSparkConfig.from_hf(hf)
    kind = {
        "dtype": torch.bfloat16,
        "device": "meta",
        "kv_codec": kv_codec("auto", torch.bfloat16, config),
        "parallel": parallel,
    }
    draft = DSparkDraft(config, dspark, 3, confidence=True, **kind)
    return DeepseekV4Model(config, **kind).weight_slots() | draft.weight_slots()


def quantised(spec, shape):
    """A weight and a scale of those shapes, of which each block says where it is."""
    count = spec.shape[0] * spec.shape[1]
    # One byte stands for the whole weight.
    weight = torch.zeros(1, dtype=torch.uint8).expand(shape)
    return weight, torch.arange(count, dtype=torch.float32).view(spec.shape)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("preset", [FLASH, PRO], ids=["flash", "pro"])
def test_parts_make_up_every_published_tensor(preset, size):
    hf = build_config(layout="mxfp4", **preset)
    tables = {layout: tensor_table(hf, layout) for layout in ("bf16", "mxfp4", "fp8")}
    parts = [slots_of(hf, Parallel(rank, size)) for rank in range(size)]
    kinds = set()
    for name, spec in tables["bf16"].items():
        slots = [part[name] for part in parts]
        held = [slot for slot in slots if not isinstance(slot, Elsewhere)]
        cuts = [slot for slot in held if isinstance(slot, Cut)]
        assert all(tuple(slot.shape) == spec.shape for slot in held), name
        if not cuts:
            # Whole: an expert on one rank, all else on each.
            assert len(held) == (1 if ".ffn.experts." in name else size), name
            continue
        kinds.add(re.sub(r"^(layers|mtp)\.\d+\.", "", name))
        assert len(cuts) == size, name
        # Side by side, they are the whole.
        across = cuts[0].rows == range(spec.shape[0])
        pieces = [cut.columns if across else cut.rows for cut in cuts]
        assert [at.start for at in pieces] == [0, *(at.stop for at in pieces[:-1])]
        assert pieces[-1].stop == spec.shape[1 if across else 0]
        for layout in ("mxfp4", "fp8"):
            scale = tables[layout].get(name.removesuffix(".weight") + ".scale")
            if scale is None:
                continue
            weight, where = quantised(scale, tables[layout][name].shape)
            fp8 = tables[layout][name].dtype == "F8_E4M3"
            weight = weight.view(torch.float8_e4m3fn if fp8 else torch.int8)
            got = [cut.part_of(weight, where) for cut in cuts]
            assert None not in got, f"{name} is cut within a block"
            shape_of = (block_fp8 if fp8 else mxfp4).scale_shape
            for cut, (piece, its_scale) in zip(cuts, got, strict=True):
                own = (len(cut.rows), len(cut.columns))
                assert tuple(its_scale.shape) == shape_of(*own)
                assert piece.shape == (own[0], own[1] // (1 if fp8 else 2))
            joined = torch.cat([its_scale for _, its_scale in got], int(across))
            assert torch.equal(joined, where), name
    expected = {
        "attn.attn_sink",
        "attn.wq_b.weight",
        "attn.wo_a.weight",
        "attn.wo_b.weight",
        "ffn.shared_experts.w1.weight",
        "ffn.shared_experts.w2.weight",
        "ffn.shared_experts.w3.weight",
        "embed.weight",
        "head.weight",
    }
    assert kinds == (expected if size > 1 else set())


@pytest.mark.parametrize(("size", "replicas"), [(1, 8), (8, 2), (2, 4)])
def test_every_expert_is_on_one_rank_of_all_replicas(size, replicas):
    hf = build_config(layout="mxfp4", draft="none", **FLASH)
    config = DeepseekV4Config.from_hf(hf)
    holders = []
    for replica in range(replicas):
        for rank in range(size):
            place = Parallel(rank, size, replica=replica, replicas=replicas)
            slots = DeepseekV4Model(
                config, dtype=torch.bfloat16, device="meta", parallel=place
            ).weight_slots()
            held = [
                e
                for e in range(config.n_routed_experts)
                if not isinstance(
                    slots[f"layers.1.ffn.experts.{e}.w2.weight"], Elsewhere
                )
            ]
            holders += held
    assert holders == list(range(config.n_routed_experts))


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (Parallel(size=4), "o_groups = 2, of 4 heads, does not divide among 4"),
        (
            Parallel(size=1, replicas=5),
            "n_routed_experts = 12 does not divide among 1 tensor-parallel · 5 data-parallel ranks",
        ),
    ],
)
def test_a_size_that_does_not_divide_is_refused_with_its_numbers(place, words):
    with pytest.raises(ValueError, match=words) as caught:
        DeepseekV4Model(config_of(checkpoint()), dtype=torch.float32, parallel=place)
    assert "\n" not in str(caught.value)


def test_a_part_within_a_block_of_scales_has_the_values_of_the_whole():
    """Which small dimensions need: what is cut there is dequantised first."""
    g = torch.Generator().manual_seed(0)
    shape, rows, columns = (200, 256), range(40, 130), range(64, 256)
    for quantise, dequantise in (
        (block_fp8.quantize, block_fp8.dequantize),
        (mxfp4.quantize, mxfp4.dequantize),
    ):
        pair = quantise(torch.randn(shape, generator=g))
        whole = dequantise(*pair)
        to = torch.full((len(rows), len(columns)), torch.nan)
        Cut(to, shape, rows, columns).keep(*pair)
        assert torch.equal(to, whole[40:130, 64:256])


def test_memory_for_another_part_is_refused():
    with pytest.raises(ValueError, match="do not fit"):
        Cut(torch.empty(3, 8), (8, 8), range(4))
