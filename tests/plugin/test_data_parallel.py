"""Two data-parallel ranks of `vllm serve`, one of them idle: vLLM lets it run along with batches of nobody's tokens."""

from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import servers
from engines import Answer, difference, prompt, running
from servers import NAME, serving

OPTIONS = """
    --data-parallel-size 2 --api-server-count 1 --dtype float32 --max-model-len 512 --max-num-seqs 16
    --kv-cache-memory-bytes 128M --enforce-eager --speculative-config '{"method":"dspark"}'
"""
TOKENS = 6
PROMPTS = [prompt(1 + 7 * i % 150, seed=i) for i in range(200)]


@pytest.fixture(scope="module")
def one_rank(small_dspark):
    """The answers of an engine by itself."""
    with running(
        small_dspark,
        max_model_len=512,
        kv_cache_memory_bytes=1 << 27,
        speculative_config={"method": "dspark"},
    ) as engine:
        return engine.generate(PROMPTS, max_tokens=TOKENS)


@pytest.fixture(scope="module")
def server(one_rank, small_dspark, tmp_path_factory):
    log = tmp_path_factory.mktemp("ranks") / "log"
    # An engine runs its worker in its own process, or there would be two more of them to start.
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment = servers.environment() | own
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(servers, "READY_SECONDS", 500)
        patch.setattr(servers, "environment", lambda: environment)
        with serving(small_dspark, log, OPTIONS) as server:
            yield server


def seconds_of(server) -> dict[str, float]:
    """Time on a CPU, by engine."""
    processes = psutil.Process(server.process.pid).children(recursive=True)
    engines = {" ".join(process.cmdline()).strip(): process for process in processes}
    return {
        rank: engines[f"VLLM::EngineCore_DP{rank}"].cpu_times().user for rank in "01"
    }


@pytest.mark.covers(
    spec="dspark",
    caching="on",
    layout="paged",
    scheduling="async",
    graphs="none",
    ranks="DP",
    kv="float32",
)
def test_a_busy_rank_beside_an_idle_one_gives_the_text_of_one_rank(server, one_rank):
    client = server.client

    def ask(ids):
        answer = client.completions.create(
            model=NAME,
            prompt=ids,
            max_tokens=TOKENS,
            temperature=0,
            extra_headers={"X-data-parallel-rank": "0"},
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        return answer.choices[0].token_ids

    before = seconds_of(server)
    with ThreadPoolExecutor(16) as threads:
        texts = list(threads.map(ask, PROMPTS))
    busy, idle = (
        seconds - before[rank] for rank, seconds in seconds_of(server).items()
    )
    for reference, tokens in zip(one_rank, texts, strict=True):
        assert len(tokens) == TOKENS
        difference(reference, Answer(tokens, reference.logprobs, cached=0))
    assert server.series("vllm:generation_tokens_total", "engine") == {
        "0": len(PROMPTS) * TOKENS,
        "1": 0,
    }
    hits = server.series("atom_bridge:prefix_hit_tokens_total", "engine")
    assert hits.keys() == {"0", "1"}
    assert hits == server.series("vllm:prefix_cache_hits_total", "engine")
    assert server.metric("vllm:spec_decode_num_draft_tokens_total") > 0
    log = server.log.read_text(errors="replace")
    assert "Traceback" not in log
    # Each step of the busy rank ends only when the idle one has run along.
    assert "rank 1 in world size 2 is assigned as DP rank 1" in log
    print(f"on a CPU: {busy:.1f} s of the busy rank, {idle:.1f} s of the idle one")
    assert idle > 0.1 * busy
