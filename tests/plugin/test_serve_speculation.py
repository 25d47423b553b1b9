"""`vllm serve` with a draft, as its users see it: text, acceptance and what the log says."""

import re

import pytest
from servers import PROMPT, serving

OPTIONS = """
    --max-model-len 1024 --max-num-seqs 8 --kv-cache-memory-bytes 512M --dtype float32
    --async-scheduling --enable-prefix-caching --trust-remote-code --speculative-config {"method":"dspark"}
"""


@pytest.fixture(scope="module")
def server(agreeing_dspark, tmp_path_factory):
    log = tmp_path_factory.mktemp("serve") / "log"
    options = OPTIONS.replace('{"method":"dspark"}', """'{"method":"dspark"}'""")
    with serving(agreeing_dspark, log, options) as server:
        yield server


def test_acceptance_is_told_by_vllms_own_metrics(server):
    prompts = [f"{PROMPT} {i}" for i in range(8)]
    answer = server.complete(prompts, 64, ignore_eos=True)
    made = answer.usage.completion_tokens
    assert made == 8 * 64
    drafts = server.metric("vllm:spec_decode_num_drafts_total")
    drafted = server.metric("vllm:spec_decode_num_draft_tokens_total")
    accepted = server.metric("vllm:spec_decode_num_accepted_tokens_total")
    by_position = server.series("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    rates = [by_position[str(i)] / drafts for i in range(5)]
    length = 1 + accepted / drafts
    print("accepted by position", [f"{rate:.2f}" for rate in rates])
    print(f"tokens a step {length:.2f}")
    assert drafted == 5 * drafts
    assert 0 < accepted < drafted
    assert sum(by_position.values()) == accepted
    assert rates == sorted(rates, reverse=True)
    assert length >= 1.8


def test_the_log_says_what_was_asked_and_what_it_became(server):
    log = server.log.read_text()
    assert re.search(r"speculation +dspark, K = 5 \(trained for 5\)", log)
    assert re.search(r"cache groups +.*draft window 64", log)
    assert re.search(r"async scheduling +on", log)
    assert re.search(r"patches +.*draft-length applied", log)
