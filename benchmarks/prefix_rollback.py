"""What a prefix hit is worth that is rolled back by so many tokens: the error of each policy of `state_layout="ring"`.

    python benchmarks/prefix_rollback.py [--checkpoint DIR] [--plot FILE]

Each prompt is a prefix and a tail. It is answered from paged state without a hit, which is the reference, then with rings:
cold, in which case nothing is rolled back; again, as a hit; and without caching, its last chunk as short as the tail. The
error is the largest difference of a log-probability among the likeliest eight at the first four tokens, float32.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}

PREFIXES, TAIL = (2048, 6144, 17408), 65
POLICIES = ("window", "256", "384", "512", "640", "atom", "exact")
Answers = list[list[dict[int, float]]]


def prompts(vocabulary: int) -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(3, vocabulary, (n + TAIL,), generator=generator).tolist()
        for n in PREFIXES
    ]


def engine_of(checkpoint: Path, **options: Any) -> Any:
    from vllm import LLM

    return LLM(
        str(checkpoint),
        dtype="float32",
        enforce_eager=True,
        max_model_len=PREFIXES[-1] + 128,
        max_num_batched_tokens=1024,
        kv_cache_memory_bytes=1 << 30,
        **options,
    )


@contextmanager
def given_or_tiny(checkpoint: Path | None) -> Iterator[Path]:
    """A checkpoint to serve: a tiny one for as long as it is needed, unless one is given."""
    from atom_vllm_bridge.checkpoint.make import make

    with tempfile.TemporaryDirectory() as scratch:
        yield checkpoint or make(Path(scratch) / "tiny", layout="bf16", draft="none")


def close(engine: Any) -> None:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    engine.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def answers(engine: Any, given: list[list[int]]) -> Answers:
    """Log-probabilities of the likeliest eight tokens, at four tokens, for each prompt."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=4, logprobs=8, ignore_eos=True, detokenize=False
    )
    out = []
    for ids in given:
        (done,) = engine.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        steps = done.outputs[0].logprobs
        out.append([{t: e.logprob for t, e in step.items()} for step in steps])
    return out


def errors(reference: Answers, found: Answers) -> list[float]:
    """For each prompt, up to the first token that differs."""
    worst = []
    for wanted, got in zip(reference, found, strict=True):
        most = 0.0
        for ours, theirs in zip(wanted, got, strict=True):
            common = ours.keys() & theirs.keys()
            most = max(most, *(abs(ours[t] - theirs[t]) for t in common))
            if max(ours, key=ours.__getitem__) != max(theirs, key=theirs.__getitem__):
                break
        worst.append(most)
    return worst


def measured(checkpoint: Path) -> tuple[list[list[Any]], list[tuple[int, list[float]]]]:
    """Rows of the table, and (tokens replayed, errors of hits)."""
    from atom_vllm_bridge.models.deepseek_v4.config import DeepseekV4Config
    from atom_vllm_bridge.rollback import rollback_tokens

    engine = engine_of(checkpoint, enable_prefix_caching=False)
    hf = engine.llm_engine.vllm_config.model_config.hf_config.to_dict()
    config = DeepseekV4Config.from_hf(hf)
    given = prompts(config.vocab_size)
    reference = answers(engine, given)
    close(engine)
    table, hits = [], []
    for policy in POLICIES:
        rings = {"atom": {"state_layout": "ring", "prefix_rollback": policy}}
        engine = engine_of(checkpoint, additional_config=rings)
        tokens = rollback_tokens(policy, config, 0)
        cold, hit = (errors(reference, answers(engine, given)) for _ in range(2))
        close(engine)
        table.append([policy, tokens, "hit", *hit])
        hits.append((tokens, hit))
        if policy == "exact":
            table.append([policy, "–", "cold", *cold])
    rings = {"atom": {"state_layout": "ring"}}
    engine = engine_of(checkpoint, additional_config=rings, enable_prefix_caching=False)
    uncached = errors(reference, answers(engine, given))
    close(engine)
    table.append(["any", "–", f"no caching, last chunk of {TAIL}", *uncached])
    return table, hits


def draw(hits: list[tuple[int, list[float]]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for place, prefix in enumerate(PREFIXES):
        points = sorted((tokens, found[place]) for tokens, found in hits)
        axes.plot(*zip(*points, strict=True), marker="o", label=f"prefix of {prefix}")
    axes.set(
        xlabel="tokens replayed",
        ylabel="largest error of a log-probability",
        yscale="log",
    )
    axes.legend()
    figure.savefig(file, dpi=110)


def main(
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="A DeepSeek-V4; a tiny one is made unless given."),
    ] = None,
    plot: Annotated[Path, typer.Option()] = Path("build/prefix_rollback.png"),
) -> None:
    """Print the table, and draw error against tokens replayed."""
    from tabulate import tabulate

    with given_or_tiny(checkpoint) as directory:
        table, hits = measured(directory)
    heads = ["policy", "tokens replayed", "run", *(f"prefix {n}" for n in PREFIXES)]
    print(tabulate(table, heads, tablefmt="github", floatfmt=".1e"))
    plot.parent.mkdir(parents=True, exist_ok=True)
    draw(hits, plot)


if __name__ == "__main__":
    typer.run(main)
