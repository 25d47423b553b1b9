"""On a GPU: the CPU's text, eager and from replayed graphs, with each draft and without one.

The reference is the model alone, on the CPU, in float32, with torch's ops and no engine.
"""

import json
from functools import cache, partial

import engines
import pytest
import torch
from engines import SMALL, Answer, difference, prompt, running

from atom_vllm_bridge.checkpoint.make import make
from atom_vllm_bridge.models.deepseek_v4.config import DeepseekV4Config
from atom_vllm_bridge.models.deepseek_v4.loading import iterate, load
from atom_vllm_bridge.models.deepseek_v4.local_state import LocalState
from atom_vllm_bridge.models.deepseek_v4.model import DeepseekV4Model
from atom_vllm_bridge.models.ops import registry

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: torch.cuda finds none"
)

# From 68 tokens on, the indexer has more than its 16 entries to choose from. Seven, so that a graph of eight is padded.
PROMPTS = [
    prompt(length, seed=length, vocabulary=500)
    for length in (24, 37, 63, 100, 130, 300, 700)
]
NEW = 64
SPECULATION = {
    "none": None,
    "dspark": {"method": "dspark", "num_speculative_tokens": 5},
    "mtp": {"method": "mtp", "num_speculative_tokens": 3},
}
CHECKPOINTS = {
    "none": "small_checkpoint",
    "dspark": "agreeing_dspark",
    "mtp": "agreeing_mtp",
}
# vLLM's managers of graphs: of the target, and of each kind of draft.
MANAGERS = {
    "none": {"ModelCudaGraphManager"},
    "dspark": {"ModelCudaGraphManager", "DFlashCudaGraphManager"},
    "mtp": {"ModelCudaGraphManager", "SpeculatorCudaGraphManager"},
}
# Tokens a step: one a request, or one more than is drafted; and those of the drafts' own graphs.
GRAPH_SIZES = [1, 2, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48]
# Of log-probabilities in bfloat16, whose logits of 8 lie 1/32 apart: on average, and where two tokens count as equal.
MEAN_ROUNDING, ROUNDING = 0.05, 0.4


@cache
@torch.inference_mode()
def cpu_says(checkpoint) -> list[Answer]:
    """Greedy continuations of PROMPTS, and the log-probability of every token of the vocabulary at each step."""
    config = DeepseekV4Config.from_hf(
        json.loads((checkpoint / "config.json").read_text())
    )
    registry.configure("torch")
    model = DeepseekV4Model(config, dtype=torch.float32)
    registry.configure("")
    of_target = iterate(
        checkpoint, wanted=lambda name: not name.startswith("mtp."), progress=False
    )
    load(model.weight_slots(), of_target)
    state = LocalState(config, len(PROMPTS), max(map(len, PROMPTS)) + NEW, model.codec)
    answers = [Answer([], [], 0) for _ in PROMPTS]
    ids, chunks = PROMPTS, [(r, 0, len(p)) for r, p in enumerate(PROMPTS)]
    for _ in range(NEW):
        batch, caches = state.step(chunks)
        streams, _ = model(torch.tensor([i for new in ids for i in new]), batch, caches)
        last = batch.query_start_loc[1:].long() - 1
        logprobs = model.logits(model.reduce(streams[last])).log_softmax(-1)
        for answer, row in zip(answers, logprobs, strict=True):
            answer.tokens.append(int(row.argmax()))
            answer.logprobs.append(dict(enumerate(row.tolist())))
        chunks = [(r, start + n, 1) for r, start, n in chunks]
        ids = [answer.tokens[-1:] for answer in answers]
    return answers


covers = partial(
    pytest.mark.covers, caching="on", layout="paged", scheduling="async", ranks="one"
)
DRAFTS = [
    pytest.param(name, marks=covers(spec="off" if name == "none" else name))
    for name in SPECULATION
]


@pytest.fixture(params=DRAFTS)
def draft(request):
    return request.param


@pytest.fixture
def checkpoint(draft, request):
    return request.getfixturevalue(CHECKPOINTS[draft])


@pytest.fixture
def replays(monkeypatch):
    """How often graphs were replayed, by the kind of their manager."""
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    counts: dict[str, int] = {}
    run = CudaGraphManager.run_fullgraph

    def counted(self, batch):
        kind = type(self).__name__
        counts[kind] = counts.get(kind, 0) + 1
        return run(self, batch)

    monkeypatch.setattr(CudaGraphManager, "run_fullgraph", counted)
    return counts


def answers_of(checkpoint, draft="none", graphs=False, **options):
    if SPECULATION[draft]:
        options["speculative_config"] = dict(SPECULATION[draft])
    if graphs:
        options |= {
            "enforce_eager": False,
            "compilation_config": {"cudagraph_capture_sizes": GRAPH_SIZES},
        }
    with running(checkpoint, max_num_seqs=8, **options) as engine:
        answers = engine.generate(PROMPTS, max_tokens=NEW)
        drafted = engine.counter("vllm:spec_decode_num_draft_tokens")
        accepted = engine.counter("vllm:spec_decode_num_accepted_tokens")
    if draft == "none":
        assert drafted == 0
    else:
        assert 0 < accepted < drafted
    return answers


def assert_the_same(references, answers):
    ties = 0
    for expected, answer in zip(references, answers, strict=True):
        ties += difference(expected, answer).near_ties
    print(f"{ties} of {len(answers)} texts end at a near tie")


def test_the_platform_is_cudas():
    from vllm.platforms import current_platform

    from atom_vllm_bridge.platforms.cuda import AtomCudaPlatform

    assert isinstance(current_platform, AtomCudaPlatform)


@pytest.mark.covers(graphs="none", kv="float32")
def test_eager_steps_give_the_cpus_text(draft, checkpoint, replays):
    answers = answers_of(checkpoint, draft)
    assert replays == {}
    assert_the_same(cpu_says(checkpoint), answers)


@pytest.mark.covers(graphs="decode", kv="float32")
def test_replayed_graphs_give_the_cpus_text(draft, checkpoint, replays):
    answers = answers_of(checkpoint, draft, graphs=True)
    assert set(replays) == MANAGERS[draft]
    assert_the_same(cpu_says(checkpoint), answers)


@pytest.mark.covers(graphs="decode", kv="bfloat16")
def test_bfloat16_stays_within_its_rounding(draft, checkpoint, replays, monkeypatch):
    monkeypatch.setattr(engines, "TOLERANCE", ROUNDING)
    answers = answers_of(checkpoint, draft, graphs=True, dtype="bfloat16")
    assert set(replays) == MANAGERS[draft]
    references = cpu_says(checkpoint)
    assert_the_same(references, answers)
    # Until a text leaves the other's.
    off = []
    for expected, answer in zip(references, answers, strict=True):
        for ours, theirs, ids in zip(
            expected.logprobs,
            answer.logprobs,
            zip(expected.tokens, answer.tokens, strict=True),
            strict=True,
        ):
            off += [abs(ours[token] - theirs[token]) for token in theirs]
            if ids[0] != ids[1]:
                break
    assert sum(off) / len(off) < MEAN_ROUNDING


@pytest.mark.parametrize("layout", ["bf16", "mxfp4", "fp8"])
def test_every_layout_gives_the_cpus_text(layout, tmp_path):
    checkpoint = make(tmp_path / layout, layout=layout, draft="none", overrides=SMALL)
    assert_the_same(cpu_says(checkpoint), answers_of(checkpoint))
