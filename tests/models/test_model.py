"""What the model promises besides its numbers."""

import json

import pytest
import torch
from harness import Runner, checkpoint, config_of, model, tokens

from atom_vllm_bridge.models.deepseek_v4.checkpoint import tensor_table
from atom_vllm_bridge.models.deepseek_v4.config import DeepseekV4Config
from atom_vllm_bridge.models.deepseek_v4.local_state import LocalState
from atom_vllm_bridge.models.deepseek_v4.model import Block, DeepseekV4Model
from atom_vllm_bridge.models.deepseek_v4.state import CacheRole, layer_caches
from atom_vllm_bridge.models.quantization.kv_codecs import kv_codec


@pytest.fixture(scope="module")
def small():
    return model(checkpoint())


def published(directory):
    config = json.loads((directory / "config.json").read_text())
    return {
        name: spec
        for name, spec in tensor_table(config, "bf16").items()
        if not name.startswith("mtp.")
    }


def test_every_published_tensor_has_a_slot_of_its_shape(small):
    table, slots = published(checkpoint()), small.weight_slots()
    assert slots.keys() == table.keys()
    for name, slot in slots.items():
        assert tuple(slot.shape) == tuple(table[name].shape), name


@pytest.mark.parametrize("absent", ["hc_mult", "n_shared_experts"])
@pytest.mark.parametrize("null", [False, True])
def test_an_absent_key_is_the_same_to_model_and_table(absent, null):
    raw = json.loads((checkpoint() / "config.json").read_text())
    raw = {**raw, absent: None}
    if not null:
        del raw[absent]
    table = tensor_table(raw, "bf16", stages=0)
    slots = DeepseekV4Model(
        DeepseekV4Config.from_hf(raw), dtype=torch.float32, device="meta"
    ).weight_slots()
    assert {n: tuple(s.shape) for n, s in slots.items()} == {
        n: tuple(s.shape) for n, s in table.items()
    }


def test_tied_embeddings_have_no_head_in_the_table():
    raw = json.loads((checkpoint() / "config.json").read_text())
    raw["tie_word_embeddings"] = True
    model = DeepseekV4Model(
        DeepseekV4Config.from_hf(raw), dtype=torch.float32, device="meta"
    )
    table = tensor_table(raw, "bf16", stages=0)
    assert "head.weight" not in table
    assert table.keys() == model.weight_slots().keys()


def test_slots_cover_all_parameters_once(small):
    """Each slot is filled with a number of its own; no parameter keeps another value."""
    config = config_of(checkpoint())
    fresh = DeepseekV4Model(config, dtype=torch.float32)
    for p in fresh.parameters():
        p.fill_(-1)
    counts: dict[int, int] = {}
    for number, slot in enumerate(fresh.weight_slots().values()):
        slot.fill_(number)
        counts[number] = slot.numel()
    seen: dict[int, int] = {}
    for tensor in (
        *fresh.parameters(),
        *(b for n, b in fresh.named_buffers() if "tid2eid" in n),
    ):
        for value, count in zip(*tensor.unique(return_counts=True), strict=True):
            seen[int(value)] = seen.get(int(value), 0) + int(count)
    assert seen == counts


def test_taps_are_means_over_streams_after_the_layer(small):
    ids = tokens(20)
    runner = Runner(small, {0: ids}, 20)
    batch, state = runner.state.step([(0, 0, 20)])
    outputs, plan = [], small.plan(batch)
    with torch.inference_mode():
        streams, taps = small(ids, batch, state, aux_layers=(5, 2))
        x = small.embed_tokens(ids).unsqueeze(1).repeat(1, small.config.hc_mult, 1)
        for layer, caches in zip(small.layers, state, strict=True):
            x = layer(x, ids, plan, caches)
            outputs.append(x)
    assert torch.equal(streams, outputs[4])
    assert len(taps) == 2
    assert torch.equal(taps[0], outputs[1].mean(1))
    assert torch.equal(taps[1], outputs[4].mean(1))


def test_placeholder_ids_count_as_zero(small):
    a, b = tokens(12), tokens(12)
    a[[3, 11]], b[[3, 11]] = -1, 0
    got, want = (Runner(small, {0: ids}, 12).step([(0, 0, 12)]) for ids in (a, b))
    assert torch.equal(got, want)


def test_caches_have_the_rows_that_layers_need(small):
    config = small.config
    codec = kv_codec("fp8", torch.bfloat16, config)
    kinds = {
        "sliding_attention": {"window"},
        "heavily_compressed_attention": {"window", "compressed", "compressor"},
        "compressed_sparse_attention": {role.value for role in CacheRole},
    }
    for layer, kind in enumerate(config.layer_types):
        shapes = layer_caches(config, layer, codec)
        assert {role.value for role in shapes} == kinds[kind]
        assert shapes[CacheRole.WINDOW].window == config.sliding_window
        if kind == "compressed_sparse_attention":
            assert shapes[CacheRole.COMPRESSOR].width == 4 * config.head_dim
            assert shapes[CacheRole.COMPRESSOR].window == 8
            assert shapes[CacheRole.INDEX].width == config.index_head_dim + 4
        if kind == "heavily_compressed_attention":
            assert shapes[CacheRole.COMPRESSOR].width == 2 * config.head_dim
            assert shapes[CacheRole.COMPRESSOR].window == 128
            assert shapes[CacheRole.COMPRESSED].tokens_per_row == 128


def test_nothing_is_asked_of_the_device(small):
    """Sizes come from the host, all else stays on the device: a step runs on tensors without values, so it can be captured."""
    runner = Runner(small, {0: tokens(290), 1: tokens(290)}, 290)
    for chunks in ([(0, 0, 280), (1, 0, 3)], [(0, 280, 1), (1, 3, 1)]):
        batch, state = runner.state.step(chunks)
        ghost = DeepseekV4Model(
            small.config, dtype=torch.bfloat16, device="meta", kv_codec=small.codec
        )
        for layer in state:
            for cache in filter(None, vars(layer).values()):
                cache.rows = cache.rows.to("meta")
                cache.table.blocks = cache.table.blocks.to("meta")
                cache.table.slots = cache.table.slots.to("meta")
        batch.positions = batch.positions.to("meta")
        batch.query_start_loc = batch.query_start_loc.to("meta")
        batch.seq_lens = batch.seq_lens.to("meta")
        ids = torch.zeros(sum(n for *_, n in chunks), dtype=torch.int64, device="meta")
        streams, taps = ghost(ids, batch, state, aux_layers=(1,))
        logits = ghost.logits(ghost.reduce(streams))
        assert logits.shape == (len(ids), small.config.vocab_size)
        assert taps[0].shape == (len(ids), small.config.hidden_size)


def test_a_draft_stage_is_a_block(small):
    config = small.config
    stage = Block(
        config,
        "sliding_attention",
        "moe",
        small.codec,
        torch.float32,
        torch.device("cpu"),
    )
    names = {f"mtp.0.{name}" for name in stage.weight_slots()}
    raw = json.loads((checkpoint() / "config.json").read_text())
    raw |= {
        "compress_ratios": [*raw["compress_ratios"][:5], 0],
        "num_nextn_predict_layers": 1,
    }
    table = {n for n in tensor_table(raw, "bf16", stages=1) if n.startswith("mtp.0.")}
    assert names <= table
    assert {n.removeprefix("mtp.0.").split(".")[0] for n in table - names} <= {
        "e_proj",
        "h_proj",
        "enorm",
        "hnorm",
        "norm",
        "hc_head_fn",
        "hc_head_base",
        "hc_head_scale",
    }


def test_a_missing_cache_is_named(small):
    runner = Runner(small, {0: tokens(4)}, 4)
    batch, state = runner.state.step([(0, 0, 4)])
    state[1].index = None
    with pytest.raises(ValueError, match="layer_caches"):
        small(tokens(4), batch, state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"compress_ratios": [0, 4, 64, 4, 0]},
            r"compress_ratios\[2\] = 64 is unknown",
        ),
        ({"compress_ratios": [0, 4]}, "2 entries for 5 layers"),
        ({"head_dim": None}, "head_dim is missing"),
        ({"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid' is not supported"),
        ({"o_groups": 3}, "does not divide into o_groups = 3"),
        ({"num_experts_per_tok": 13}, "exceeds n_routed_experts = 12"),
        ({"qk_rope_head_dim": 34}, "qk_rope_head_dim = 34"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            "'linear' is not supported",
        ),
        ({"index_topk": 0}, "index_topk = 0 must be an integer of at least 1"),
        ({"index_topk": 2.5}, "index_topk = 2.5 must be an integer"),
        ({"index_topk": True}, "index_topk = True must be an integer"),
        ({"index_topk": "8"}, "index_topk = '8' must be an integer"),
        ({"moe_intermediate_size": 36}, "not a multiple of 8"),
    ],
    ids=str,
)
def test_configs_that_are_not_understood_are_refused(change, message):
    raw = json.loads((checkpoint() / "config.json").read_text()) | change
    with pytest.raises(ValueError, match=message):
        DeepseekV4Config.from_hf(raw)


def test_config_is_the_same_in_transformers_words():
    from transformers import DeepseekV4Config as HFConfig

    directory = checkpoint()
    hf = HFConfig.from_pretrained(directory).to_dict()
    assert "compress_ratios" not in hf
    hf["qk_rope_head_dim"] = None
    assert DeepseekV4Config.from_hf(hf) == config_of(directory)


def test_released_blocks_are_all_there_again(small):
    state = LocalState(small.config, 2, 200, small.codec)
    free = {key: sorted(group.free) for key, group in state._groups.items()}
    state.step([(0, 0, 190), (1, 0, 3)])
    state.step([(0, 190, 2)])
    for request in (0, 1):
        state.release(request)
    assert {k: sorted(g.free) for k, g in state._groups.items()} == free
