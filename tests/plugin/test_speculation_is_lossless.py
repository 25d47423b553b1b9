"""Drafts change the pace of a greedy text, never the text (float32; in bfloat16, up to near ties)."""

import math
from dataclasses import dataclass

import pytest
from drafts import watching
from engines import SHALLOW, difference, prompt, running

TOKENS = 128
CHUNK = 150
# Every residue around multiples of 4 and 128, short prompts, and two that are read in chunks.
LENGTHS = [*range(120, 137), *range(252, 261), *range(60, 69), *range(1, 28), 400, 700]
VOCABULARY = SHALLOW["vocab_size"]
PROMPTS = [prompt(length, i, VOCABULARY) for i, length in enumerate(LENGTHS)]
# A second prompt begins with so many tokens of a first one.
SHARED = (130, 640, 900)
TAILS = [prompt(40, seed, VOCABULARY) for seed in (1, 2)]
# Spoken text that a second prompt goes on from, so that the hit's last block of 128 tokens was drafted and verified; by layout:
# rings take no hit that is short.
SPOKEN = {
    layout: [prompt(length, length, VOCABULARY) for length in lengths]
    for layout, lengths in {"paged": (101, 102), "ring": (613, 614)}.items()
}
SPOKEN_TOKENS = 160


@dataclass(frozen=True)
class Run:
    """An engine: which draft, of how many tokens, from which checkpoint, how it is scheduled, and where its state lies."""

    method: str
    drafts: int
    checkpoint: str
    asynchronous: bool
    layout: str = "paged"

    def __str__(self) -> str:
        scheduling = "async" if self.asynchronous else "sync"
        return (
            f"{self.checkpoint}-{self.method}-{self.drafts}-{scheduling}-{self.layout}"
        )

    @property
    def directory(self) -> str:
        """The fixture that makes it."""
        return f"{self.checkpoint}_{self.method}"

    @property
    def options(self) -> dict:
        draft = {"method": self.method, "num_speculative_tokens": self.drafts}
        return {
            "speculative_config": draft,
            "async_scheduling": self.asynchronous,
            "additional_config": {"atom": {"state_layout": self.layout}},
        }

    @property
    def covers(self) -> pytest.MarkDecorator:
        return pytest.mark.covers(
            spec=self.method,
            caching="on",
            layout=self.layout,
            scheduling="async" if self.asynchronous else "sync",
            graphs="none",
            ranks="one",
            kv="float32",
        )

    @property
    def size(self) -> tuple[list, int, int]:
        """Prompts, tokens to say, and blocks, too few for all requests that may run at once."""
        if self.layout == "ring":
            return PROMPTS, TOKENS, 400
        if self.checkpoint == "agreeing":
            return PROMPTS, TOKENS, 900
        return PROMPTS[::2], TOKENS // 2, 560

    def hit(self, shared: int) -> int:
        """Tokens that a hit finds. An MTP row holds the next token too, so that vLLM takes one block less.

        With rings, MTP rows among them, 512 are computed again (3 layers and a draft, of windows of 128); no more is not used.
        """
        if self.layout == "ring":
            found = shared // 128 * 128
            return found if found > 512 else 0
        return (shared // 128 - (self.method == "mtp")) * 128


RUNS = [
    Run("dspark", 1, "agreeing", True),
    Run("dspark", 3, "agreeing", False),
    Run("dspark", 5, "agreeing", True),
    Run("dspark", 7, "agreeing", False),
    # Of these two, nearly every draft is rejected.
    Run("dspark", 5, "random", False),
    Run("mtp", 3, "random", True),
    Run("mtp", 1, "agreeing", False),
    Run("mtp", 2, "agreeing", True),
    Run("mtp", 3, "agreeing", False),
    Run("dspark", 5, "agreeing", True, "ring"),
    Run("mtp", 3, "agreeing", False, "ring"),
]


@dataclass
class Texts:
    """What an engine says that does not draft, without a hit."""

    prompts: list
    hits: list
    spoken: dict[str, list]
    follow_ups: dict[str, list]
    follow_up_prompts: dict[str, list]


def speak(engine, prompts, tokens: int) -> Texts:
    texts = engine.generate(prompts, max_tokens=tokens)
    seconds = [prompt(shared, shared, VOCABULARY) + TAILS[1] for shared in SHARED]
    hits = engine.generate(seconds, max_tokens=32)
    spoken, follow_ups, follow_up_prompts = {}, {}, {}
    for layout, begun in SPOKEN.items():
        spoken[layout] = engine.generate(begun, max_tokens=SPOKEN_TOKENS)
        follow_up_prompts[layout] = [
            ids + answer.tokens + TAILS[0]
            for ids, answer in zip(begun, spoken[layout], strict=True)
        ]
        engine.reset_prefix_cache()
        follow_ups[layout] = engine.generate(follow_up_prompts[layout], max_tokens=32)
    alone = [texts, hits, *spoken.values(), *follow_ups.values()]
    assert not any(answer.cached for answers in alone for answer in answers)
    return Texts(texts, hits, spoken, follow_ups, follow_up_prompts)


@pytest.fixture(scope="module")
def spoken(request):
    """By checkpoint, what is said without drafts."""
    known = {}

    def by(run: Run) -> Texts:
        # Random targets of one seed are the same, whatever drafts for them.
        name = run.directory.replace("random_mtp", "random_dspark")
        if name not in known:
            with running(request.getfixturevalue(name), max_num_seqs=64) as engine:
                known[name] = speak(engine, *run.size[:2])
        return known[name]

    return by


@pytest.fixture(
    scope="module",
    params=[pytest.param(run, marks=run.covers) for run in RUNS],
    ids=map(str, RUNS),
)
def run(request):
    return request.param


@pytest.fixture(scope="module")
def expected(run, spoken):
    return spoken(run)


@pytest.fixture(scope="module")
def engine(run, expected, request):
    with running(
        request.getfixturevalue(run.directory),
        max_num_seqs=48,
        max_model_len=1024,
        num_gpu_blocks_override=run.size[2],
        # vLLM keeps the windows at the end of a prompt; for hits of spoken text it takes those of every 128 tokens.
        prefix_cache_retention_interval=128,
        **run.options,
    ) as engine:
        assert engine.scheduler.scheduler_config.async_scheduling is run.asynchronous
        yield engine


def compare(expected, answers) -> str:
    """Fail where texts differ beyond rounding; else say how far they are apart."""
    found = [difference(*pair) for pair in zip(expected, answers, strict=True)]
    gaps = [gap for one in found for gap in one.gaps]
    compared = sum(one.compared for one in found)
    if not gaps:
        assert compared == sum(len(answer.tokens) for answer in expected)
    return (
        f"{compared} tokens compared, log-probabilities within {max(one.logprob for one in found):.1e}, "
        f"{len(gaps)} near ties"
        + f" at gaps up to {max(gaps, default=0):.1e}" * bool(gaps)
    )


def test_requests_that_come_wait_and_resume_give_the_same_text(run, engine, expected):
    """Prefill chunks, verified drafts and preemptions side by side; drafts across every boundary of 4 and 128 tokens."""
    prompts, tokens, _ = run.size
    with watching(engine) as watch, engine.chunks_of(CHUNK):
        answers = engine.generate_over_time(prompts, at_once=16, max_tokens=tokens)
    preemptions = engine.counter("vllm:num_preemptions")
    drafted = engine.counter("vllm:spec_decode_num_draft_tokens")
    accepted = engine.counter("vllm:spec_decode_num_accepted_tokens")
    print(
        f"\n{run}: {compare(expected.prompts, answers)}; {accepted:.0f} of {drafted:.0f} drafts accepted "
        f"({watch.acceptance():.0%} of those judged), {preemptions:.0f} preemptions, "
        f"{watch.mixed()} of {len(watch.steps)} steps mixed"
    )
    assert preemptions > 0
    assert watch.mixed() > 0
    assert drafted > accepted
    places = range(1, run.drafts + 1)
    kept = (False, True) if run.checkpoint == "agreeing" else (False,)
    for period in (4, 128):
        assert watch.crossings(period) >= {(p, was) for p in places for was in kept}


def test_a_hit_gives_the_same_text(run, engine, expected):
    for shared, text in zip(SHARED, expected.hits, strict=True):
        first, second = (prompt(shared, shared, VOCABULARY) + tail for tail in TAILS)
        engine.reset_prefix_cache()
        engine.generate([first], max_tokens=1)
        (hit,) = engine.generate([second], max_tokens=32)
        assert hit.cached == run.hit(shared)
        compare([text], [hit])


def test_a_hit_of_drafted_text_gives_the_same_text(run, engine, expected):
    engine.reset_prefix_cache()
    begun, layout = SPOKEN[run.layout], run.layout
    answers = engine.generate(begun, max_tokens=SPOKEN_TOKENS)
    compare(expected.spoken[layout], answers)
    hits = engine.generate(expected.follow_up_prompts[layout], max_tokens=32)
    compare(expected.follow_ups[layout], hits)
    for ids, hit in zip(begun, hits, strict=True):
        assert len(ids) < hit.cached == run.hit(len(ids) + SPOKEN_TOKENS - 1)


@pytest.fixture(scope="module", params=[("dspark", 5), ("mtp", 3)], ids=str)
def bfloat16(request, tmp_path_factory):
    """The answers in bfloat16 without drafts and with; in place of log-probabilities, logits.

    No choice is left to the model: all experts, and all entries of the indexer, are taken. Where there is a choice, scores
    that nearly tie turn it, and the text with it, however small the rounding.
    """
    from atom_vllm_bridge.checkpoint.make import make

    method, drafts = request.param
    no_choice = {"n_routed_experts": 2, "num_experts_per_tok": 2, "index_topk": 512}
    stages = {"n_mtp_layers": 2} if method == "dspark" else {}
    checkpoint = make(
        tmp_path_factory.mktemp("checkpoints") / f"bfloat16-{method}",
        preset="agreeing",
        layout="bf16",
        draft=method,
        overrides=SHALLOW | no_choice | stages,
    )
    run = Run(method, drafts, "agreeing", True)
    answers = []
    for options in ({}, run.options):
        with running(
            checkpoint,
            dtype="bfloat16",
            logprobs_mode="raw_logits",
            max_num_seqs=32,
            **options,
        ) as engine:
            answers.append(engine.generate(PROMPTS[::2], max_tokens=TOKENS))
            accepted = engine.counter("vllm:spec_decode_num_accepted_tokens")
            drafted = engine.counter("vllm:spec_decode_num_draft_tokens")
    assert 0 < accepted < drafted
    return answers


def test_bfloat16_texts_part_at_near_ties_alone(bfloat16):
    """Logits that have seen other batch shapes are a few steps of bfloat16 apart, and tokens change only within these.

    A bfloat16 number between 2ⁿ and 2ⁿ⁺¹ is a multiple of 2ⁿ⁻⁷, its step. Rounding the last hidden state and then the logit
    moves it by half a step each, so that two runs put it at most two steps apart, and turn the order of two logits that are
    at most twice as far from each other.
    """
    apart, gaps = 0.0, []
    for reference, other in zip(*bfloat16, strict=True):
        pairs = zip(reference.logprobs, other.logprobs, strict=True)
        for place, (ours, theirs) in enumerate(pairs):
            best, second = sorted(ours.values(), reverse=True)[:2]
            step = 2.0 ** (math.floor(math.log2(abs(best))) - 7)
            common = ours.keys() & theirs.keys()
            apart = max(apart, *(abs(ours[t] - theirs[t]) / step for t in common))
            if reference.tokens[place] != other.tokens[place]:
                gaps.append((best - second) / step)
                break
    print(
        f"\nbfloat16: logits up to {apart:.1f} steps apart; {len(gaps)} of {len(bfloat16[0])} texts part, "
        f"at gaps of up to {max(gaps, default=0):.1f} steps"
    )
    assert apart <= 2
    assert max(gaps, default=0) <= 4
