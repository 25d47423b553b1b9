"""The model on a GPU, whose ops are Triton's, against the model on a CPU; and a captured step against the same step run."""

import itertools

import pytest
import torch
from harness import checkpoint, config_of, model, one_shot, poison, tokens

from atom_vllm_bridge.models.deepseek_v4.loading import iterate, load
from atom_vllm_bridge.models.deepseek_v4.local_state import LocalState
from atom_vllm_bridge.models.deepseek_v4.model import DeepseekV4Model
from atom_vllm_bridge.models.ops import registry
from atom_vllm_bridge.models.quantization.kv_codecs import kv_codec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
# Enough for the indexer to choose among 50 entries, in chunks and then token by token.
LENGTH, CHUNKS = 200, (0, 1, 70, 130, 192)


LAYOUTS = pytest.mark.parametrize("layout", ["bf16", "mxfp4", "fp8"])


def on_gpu(dtype=torch.float32, codec="auto", layout="bf16"):
    directory = checkpoint(layout=layout)
    config = config_of(directory)
    filled = DeepseekV4Model(
        config, dtype=dtype, device="cuda", kv_codec=kv_codec(codec, dtype, config)
    )
    load(filled.weight_slots(), iterate(directory, progress=False))
    return filled


@torch.inference_mode()
def in_steps(gpu, ids):
    """Log-probabilities [T, V], from chunks and then from steps of one token."""
    state = LocalState(gpu.config, 1, len(ids), gpu.codec, device="cuda")
    poison(state)
    starts = [*CHUNKS, *range(CHUNKS[-1] + 1, len(ids)), len(ids)]
    found = []
    for start, end in itertools.pairwise(starts):
        batch, caches = state.step([(0, start, end - start)])
        streams, _ = gpu(ids[start:end].cuda(), batch, caches)
        found.append(gpu.logits(gpu.reduce(streams)))
    return torch.cat(found).log_softmax(-1).cpu()


@pytest.mark.parametrize(
    ("codec", "tolerance"), [("auto", 2e-4), ("fp8_ds_mla", 2e-2)], ids=str
)
@LAYOUTS
def test_float32_on_a_gpu_is_float32_on_a_cpu(layout, codec, tolerance):
    ids = tokens(LENGTH)
    want = one_shot(model(checkpoint(layout=layout), codec=codec), ids)
    got = in_steps(on_gpu(codec=codec, layout=layout), ids)
    assert (got - want).abs().max() < tolerance


@LAYOUTS
def test_bfloat16_stays_close(layout):
    ids = tokens(LENGTH)
    want = one_shot(model(checkpoint(layout=layout), torch.bfloat16), ids)
    got = in_steps(on_gpu(torch.bfloat16, layout=layout), ids)
    assert (got - want).abs().mean() < 2e-2


def test_the_ops_are_tritons():
    on_gpu()
    chosen = {c.op: c.provider for c in registry.table() if c.device == "cuda"}
    triton = {"hc_pre", "hc_post", "write_keys", "sparse_attention", "router"}
    triton |= {"linear", "experts", "feed_forward", "grouped_output_projection"}
    assert {chosen[op] for op in triton} == {"triton"}


def test_weights_stay_as_they_are_stored():
    """So that neither a load nor what it leaves takes much more than the checkpoint."""
    wide = {"hidden_size": 1024, "moe_intermediate_size": 512, "n_routed_experts": 32}
    directory = checkpoint(layout="mxfp4", **wide)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gpu = DeepseekV4Model(config_of(directory), dtype=torch.bfloat16, device="cuda")
    report = load(gpu.weight_slots(), iterate(directory, progress=False))
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= 1.3 * report.nbytes
    layer = gpu.layers[1]
    formats = [
        band.format for w in (layer.attn.w_in, layer.ffn.w13) for band in w.bands
    ]
    assert formats == ["fp8", "plain", "mxfp4"]


@LAYOUTS
@torch.inference_mode()
def test_a_captured_step_is_the_step(layout):
    gpu, ids = on_gpu(layout=layout), tokens(150)
    state = LocalState(gpu.config, 3, 150, gpu.codec, device="cuda")
    for name, length in ((0, 140), (1, 70), (2, 9)):
        batch, caches = state.step([(name, 0, length)])
        gpu(ids[:length].cuda(), batch, caches)
    batch, caches = state.step([(0, 140, 1), (1, 70, 1), (2, 9, 1)], pad_tokens=1)
    last = torch.tensor([5, 6, 7, -1], device="cuda")

    def step():
        streams, _ = gpu(last, batch, caches)
        return gpu.logits(gpu.reduce(streams))

    want = step().clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    side.synchronize()
    for table in {
        id(c.table): c.table for s in caches for c in vars(s).values() if c
    }.values():
        table._derived.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    got.fill_(torch.nan)
    graph.replay()
    assert torch.equal(got[:3], want[:3])
