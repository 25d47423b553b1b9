"""Paged state and rings side by side: what a request and a cached token take, and what a decode step costs.

    python benchmarks/state_layouts.py [--checkpoint DIR]

One engine after the other in this process, with the same cache memory; a tiny checkpoint is made unless one is given.
"""

import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from prefix_rollback import close, given_or_tiny

LENGTHS = (4096, 32768, 1 << 20)
# Of the cache; a request of a million tokens must fit into it.
MEMORY = 4 << 30
REQUESTS, PROMPT, NEW = 8, 1024, 64
# Of each request's first steps, which read the prompt.
WARM = 8


def measured(checkpoint: Path, layout: str, max_model_len: int) -> list[Any]:
    """A row of the table."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(checkpoint),
        dtype="float32",
        enforce_eager=True,
        max_model_len=max_model_len,
        max_num_seqs=REQUESTS,
        max_num_batched_tokens=1024,
        kv_cache_memory_bytes=MEMORY,
        additional_config={"atom": {"state_layout": layout}},
    )
    core = engine.llm_engine.engine_core.engine_core
    manager = core.scheduler.kv_cache_manager
    runner = core.model_executor.driver_worker.worker.model_runner
    blocks = manager.block_pool.num_gpu_blocks
    page = MEMORY // blocks
    metadata, held = [], []
    prepare = runner.model_state.prepare_attn

    def timed(*args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        made = prepare(*args, **options)
        metadata.append(time.perf_counter() - start)
        held.append(blocks - manager.block_pool.get_num_free_blocks())
        return made

    runner.model_state.prepare_attn = timed
    prompts = [
        {"prompt_token_ids": [3 + (31 * i + 7 * j) % 900 for j in range(PROMPT)]}
        for i in range(REQUESTS)
    ]
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    engine.generate(prompts, params, use_tqdm=False)
    # What stays of eight prompts, and nothing else, when no request runs.
    cached = sum(b.block_hash is not None for b in manager.block_pool.blocks)
    metadata.clear()
    held.clear()
    assert engine.reset_prefix_cache()
    start = time.perf_counter()
    engine.generate(prompts, params, use_tqdm=False)
    took = time.perf_counter() - start
    row = [
        layout,
        max_model_len,
        f"{page / 1024:.0f}",
        f"{max(held) / REQUESTS * page / 2**20:.1f}",
        f"{cached * page / (REQUESTS * PROMPT) / 1024:.1f}",
        f"{statistics.median(metadata[WARM:]) * 1e3:.2f}",
        f"{REQUESTS * NEW / took:.0f}",
    ]
    close(engine)
    return row


def main(
    checkpoint: Annotated[Path | None, typer.Option(help="A DeepSeek-V4.")] = None,
) -> None:
    """Print the table."""
    from tabulate import tabulate

    with given_or_tiny(checkpoint) as directory:
        rows = [
            measured(directory, layout, length)
            for length in LENGTHS
            for layout in ("paged", "ring")
        ]
    heads = [
        "layout",
        "max_model_len",
        "KiB a block",
        f"MiB a request of {PROMPT} tokens",
        "KiB a cached token",
        "ms metadata a step",
        f"tokens/s, {REQUESTS} requests",
    ]
    print(tabulate(rows, heads, tablefmt="github"))


if __name__ == "__main__":
    typer.run(main)
