"""On a GPU: the CPU's text, eager and from replayed graphs, with each draft and without one.

The reference is the model alone, on the CPU, in float32, with torch's ops and no engine.
"""

import json
from collections import defaultdict
from functools import cache, partial

import pytest
import torch
from engines import SMALL, TOLERANCE, Answer, difference, prompt, running, steps

from atom_vllm_bridge.attention.backend import AtomMetadataBuilder
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
# Of ten thousand steps a few meet two experts, or two entries at the end of a selection, that score alike, and take the other one:
# the reference itself is off by 5.7e-3 from itself in other company, at one step.
MOST_STRAYS, STRAY = 5, 2e-2


# Prompts, and how many tokens follow each.
TEXTS = {
    "few": (PROMPTS, NEW),
    # 10,240 tokens of requests that come and go, so that every batch size from one to eight is met again and again.
    "many": ([prompt(9 + 7 * i % 180, i, 500) for i in range(80)], 128),
    # Longer than what a ring rolls back.
    "long": ([prompt(length, length, 500) for length in (1300, 1500)], 16),
}


@cache
@torch.inference_mode()
def cpu_says(checkpoint, texts: str = "few") -> list[Answer]:
    """Greedy continuations, and log-probabilities at each step: of all the vocabulary, of the 64 likeliest where there are many."""
    prompts, new = TEXTS[texts]
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
    state = LocalState(config, len(prompts), max(map(len, prompts)) + new, model.codec)
    answers = [Answer([], [], 0) for _ in prompts]
    ids, chunks = prompts, [(r, 0, len(p)) for r, p in enumerate(prompts)]
    for _ in range(new):
        batch, caches = state.step(chunks)
        streams, _ = model(torch.tensor([i for new in ids for i in new]), batch, caches)
        last = batch.query_start_loc[1:].long() - 1
        logprobs = model.logits(model.reduce(streams[last])).log_softmax(-1)
        for answer, row in zip(answers, logprobs, strict=True):
            answer.tokens.append(int(row.argmax()))
            kept = row.topk(64 if texts == "many" else len(row)).indices
            answer.logprobs.append(
                dict(zip(kept.tolist(), row[kept].tolist(), strict=True))
            )
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


@pytest.fixture
def addresses(monkeypatch):
    """Where the tensors of metadata lie, by builder and field: graphs read what was there when they were captured."""
    found = defaultdict(set)
    build = AtomMetadataBuilder.build

    def noted(self, *args, **options):
        metadata = build(self, *args, **options)
        for name, value in vars(metadata).items():
            if isinstance(value, torch.Tensor):
                found[id(self), name].add(value.data_ptr())
        return metadata

    monkeypatch.setattr(AtomMetadataBuilder, "build", noted)
    return found


def answers_of(checkpoint, draft="none", graphs=False, texts="few", **options):
    if SPECULATION[draft]:
        options["speculative_config"] = dict(SPECULATION[draft])
    if graphs:
        options |= {
            "enforce_eager": False,
            "compilation_config": {"cudagraph_capture_sizes": GRAPH_SIZES},
        }
    with running(checkpoint, max_num_seqs=8, **options) as engine:
        prompts, new = TEXTS[texts]
        if texts == "many":
            answers = engine.generate_over_time(prompts, at_once=1, max_tokens=new)
        else:
            answers = engine.generate(prompts, max_tokens=new)
        drafted = engine.counter("vllm:spec_decode_num_draft_tokens")
        accepted = engine.counter("vllm:spec_decode_num_accepted_tokens")
    if draft == "none":
        assert drafted == 0
    else:
        assert 0 < accepted < drafted
    return answers


def assert_the_same(references, answers, tolerance=TOLERANCE):
    ties = 0
    for expected, answer in zip(references, answers, strict=True):
        ties += difference(expected, answer, tolerance).near_ties
    print(f"{ties} of {len(answers)} texts end at a near tie")


def strays(expected: Answer, answer: Answer) -> int:
    """Steps whose log-probabilities are off, up to the token at which the texts part, if they do: there it has to be a near tie."""
    found = 0
    for _, worst, gap in steps(expected, answer):
        assert worst <= STRAY
        found += worst > TOLERANCE
        assert gap is None or gap <= max(TOLERANCE, 2 * worst)
    return found


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
def test_bfloat16_stays_within_its_rounding(draft, checkpoint, replays):
    answers = answers_of(checkpoint, draft, graphs=True, dtype="bfloat16")
    assert set(replays) == MANAGERS[draft]
    references = cpu_says(checkpoint)
    assert_the_same(references, answers, ROUNDING)
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


@pytest.mark.covers(graphs="decode", kv="float32")
def test_ten_thousand_tokens_of_changing_batches_are_the_cpus(
    draft, checkpoint, replays, addresses
):
    answers = answers_of(checkpoint, draft, graphs=True, texts="many")
    assert set(replays) == MANAGERS[draft]
    assert sum(len(answer.tokens) for answer in answers) == 10_240
    pairs = zip(cpu_says(checkpoint, "many"), answers, strict=True)
    assert sum(strays(*pair) for pair in pairs) <= MOST_STRAYS
    moved = {name for (_, name), places in addresses.items() if len(places) > 1}
    assert addresses
    assert not moved


@pytest.mark.parametrize("draft", SPECULATION)
@pytest.mark.parametrize("graphs", [False, True])
def test_rings_give_the_cpus_text_and_hits_are_rolled_back(draft, graphs, request):
    checkpoint = request.getfixturevalue(CHECKPOINTS[draft])
    prompts, new = TEXTS["long"]
    with running(
        checkpoint,
        max_num_seqs=8,
        speculative_config=SPECULATION[draft] and dict(SPECULATION[draft]),
        additional_config={"atom": {"state_layout": "ring"}},
        enforce_eager=not graphs,
        compilation_config={"cudagraph_capture_sizes": GRAPH_SIZES} if graphs else {},
    ) as engine:
        cold, again = (engine.generate(prompts, max_tokens=new) for _ in range(2))
        assert engine.features["layout"] == "ring"
        assert engine.features["graphs"] == ("decode" if graphs else "none")
    assert all(answer.cached > 0 for answer in again)
    for answers in (cold, again):
        assert_the_same(cpu_says(checkpoint, "long"), answers)


def test_adaptive_verification_gives_the_cpus_text_from_graphs(
    agreeing_dspark, replays
):
    speculative = SPECULATION["dspark"] | {"enable_adaptive_verification": True}
    with running(
        agreeing_dspark,
        max_num_seqs=8,
        speculative_config=speculative,
        enforce_eager=False,
        compilation_config={"cudagraph_capture_sizes": GRAPH_SIZES},
    ) as engine:
        answers = engine.generate(PROMPTS, max_tokens=NEW)
        drafted = engine.counter("vllm:spec_decode_num_draft_tokens")
        assert engine.features["spec"] == "adaptive"
    assert drafted > 0
    assert set(replays) == MANAGERS["dspark"]
    assert_the_same(cpu_says(agreeing_dspark), answers)


@pytest.mark.parametrize("layout", ["bf16", "mxfp4", "fp8"])
def test_every_layout_gives_the_cpus_text(layout, tmp_path):
    checkpoint = make(tmp_path / layout, layout=layout, draft="none", overrides=SMALL)
    assert_the_same(cpu_says(checkpoint), answers_of(checkpoint))
