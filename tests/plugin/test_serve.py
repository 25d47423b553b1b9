"""`vllm serve` through the bridge, as its users see it: one real server, asked with the openai client and with curl."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import openai
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from servers import NAME, PROMPT, VLLM, environment, serving

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
NO_THINKING = {"chat_template_kwargs": {"thinking": False}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "enum": [1, 2]},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def server(tiny_checkpoint, tmp_path_factory):
    options = f"""
        --tokenizer-mode deepseek_v4 --enable-auto-tool-choice --tool-call-parser deepseek_v4
        --reasoning-parser deepseek_v4 --max-model-len 2048 --max-num-seqs 16
        --kv-cache-memory-bytes {GIB} --enable-prompt-tokens-details
    """
    log = tmp_path_factory.mktemp("serve") / "log"
    with serving(tiny_checkpoint, log, options) as server:
        yield server


def test_a_worker_with_a_gibibyte_of_cache_answers_within_two(server):
    """Eight short prompts, and one of 2,000 tokens, in two steps of 1,024."""
    assert len(server.complete([PROMPT] * 8, 16).choices) == 8
    long = [3 + 7 * i % 900 for i in range(2000)]
    assert server.complete(long, 16).usage.prompt_tokens == 2000
    peaks = {
        child.name(): peak_memory(child.pid)
        for child in psutil.Process(server.process.pid).children(recursive=True)
    }
    print({name: f"{peak / GIB:.2f} GiB" for name, peak in peaks.items()})
    # A first start also holds the compiler.
    assert GIB < peaks["VLLM::Worker"] < 2 * GIB + GIB // 10 + brought_by_tools()


def brought_by_tools() -> int:
    """Bytes that transformers takes for packages which only the tests and the measurements install."""
    code = """if True:
        import numpy, psutil
        before = psutil.Process().memory_info().rss
        import pandas, pyarrow, scipy.stats, sklearn.metrics
        print(psutil.Process().memory_info().rss - before)
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def peak_memory(pid: int) -> int:
    """Bytes that a process had resident at most."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024


def test_a_completion_is_repeatable_and_counts_its_tokens(server):
    first, second = server.complete(max_tokens=16), server.complete(max_tokens=16)
    assert first.choices[0].text == second.choices[0].text
    assert first.choices[0].finish_reason == "length"
    tokens = server.tokenizer.encode(PROMPT).ids
    assert first.choices[0].prompt_token_ids == tokens
    assert len(first.choices[0].token_ids) == 16
    assert first.usage.prompt_tokens == len(tokens)
    assert first.usage.completion_tokens == 16
    assert first.usage.total_tokens == len(tokens) + 16


def test_logprobs_are_those_of_the_greedy_tokens(server):
    choice = server.complete(max_tokens=6, logprobs=3).choices[0]
    assert choice.token_ids == server.tokens(max_tokens=6)
    logprobs = choice.logprobs
    for chosen, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert len(top) == 3
        assert chosen == max(top.values()) < 0


def test_an_echoed_prompt_has_the_logprobs_of_prompt_logprobs(server):
    echoed = server.complete(max_tokens=1, echo=True, logprobs=1).choices[0]
    asked = server.complete(max_tokens=1, prompt_logprobs=1).choices[0]
    assert echoed.text == PROMPT + asked.text
    assert asked.prompt_logprobs[0] is None
    prompt = asked.prompt_token_ids
    assert echoed.logprobs.token_logprobs[1 : len(prompt)] == [
        step[str(token)]["logprob"]
        for token, step in zip(prompt[1:], asked.prompt_logprobs[1:], strict=True)
    ]


def test_a_prompt_that_is_continued_greedily_is_its_own_likeliest_continuation(server):
    prompt = server.tokenizer.encode(PROMPT).ids
    generated = server.tokens(max_tokens=6)
    scored = server.complete(prompt + generated, 1, prompt_logprobs=1).choices[0]
    ranks = [
        step[str(token)]["rank"]
        for token, step in zip(
            generated, scored.prompt_logprobs[len(prompt) :], strict=True
        )
    ]
    # A prefill in bfloat16 may swap two tokens that a decode ranked first and second.
    assert ranks[0] == 1
    assert max(ranks) <= 2


def test_a_stream_carries_the_same_text(server):
    whole = server.complete(max_tokens=16)
    parts = list(
        server.client.completions.create(
            model=NAME,
            prompt=PROMPT,
            max_tokens=16,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    texts = [part.choices[0].text for part in parts if part.choices]
    assert len(texts) > 4
    assert "".join(texts) == whole.choices[0].text
    assert parts[-1].usage.completion_tokens == 16


def test_a_chat_without_thinking_answers_with_content(server):
    choice = server.chat(extra_body=NO_THINKING).choices[0]
    assert choice.message.content
    assert choice.message.reasoning is None


@pytest.mark.parametrize("how", ["by default", "asked for"])
def test_a_chat_with_thinking_answers_with_reasoning(server, how):
    body = {"chat_template_kwargs": {"thinking": True}} if how == "asked for" else {}
    answer = server.chat(extra_body=body)
    assert answer.choices[0].message.reasoning
    assert answer.choices[0].message.content is None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 12


def test_thinking_that_ends_is_followed_by_content(server):
    # The grammar holds from the end of thinking on, and </think> is made likely from the start.
    body = {
        "structured_outputs": {"choice": ["yes", "no"]},
        "chat_template_kwargs": {"thinking": True},
        "logit_bias": {str(server.id_of("</think>")): 8.0},
    }
    message = server.chat(max_tokens=64, extra_body=body).choices[0].message
    assert message.content in ("yes", "no")
    assert "</think>" not in (message.reasoning or "")


def test_a_chat_stream_carries_the_same_reasoning(server):
    whole = server.chat().choices[0].message.reasoning
    deltas = [part.choices[0].delta for part in server.chat(stream=True)]
    assert "".join(getattr(d, "reasoning", None) or "" for d in deltas) == whole
    assert not any(delta.content for delta in deltas)


def test_a_required_tool_call_comes_back_parsed(server):
    """The grammar writes DeepSeek's own markup, and the deepseek_v4 parser reads it back."""
    answer = server.chat(
        max_tokens=400,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        logprobs=True,
        logit_bias=server.no_whitespace(),
        extra_body=NO_THINKING,
    ).choices[0]
    written = b"".join(bytes(step.bytes) for step in answer.logprobs.content).decode()
    assert '<｜DSML｜invoke name="get_weather">' in written
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert arguments.keys() == {"city", "days"}
    assert arguments["city"] in ("Paris", "Rome")
    assert arguments["days"] in (1, 2)
    assert not answer.message.content


def test_a_seed_repeats_a_sample_at_temperature_one(server):
    first, again, other = (
        server.tokens(max_tokens=16, temperature=1, seed=seed) for seed in (7, 7, 8)
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    "narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str
)
def test_sampling_narrowed_to_one_token_takes_the_likeliest(server, narrow):
    hot = {"temperature": 2.0, "seed": 1, "logprobs": 1}

    def likeliest(**body) -> list[bool]:
        # Not by id: bfloat16 logits have ties.
        found = server.complete(**hot, **body).choices[0].logprobs
        return [
            chosen == max(top.values())
            for chosen, top in zip(
                found.token_logprobs, found.top_logprobs, strict=True
            )
        ]

    assert not all(likeliest())
    assert all(likeliest(**narrow))


def test_logit_bias_forces_a_token(server):
    token = server.id_of("Ġriver")
    assert server.tokens(logit_bias={str(token): 100}) == [token] * 8


@pytest.mark.parametrize(
    "penalty", [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0}], ids=str
)
def test_a_penalty_on_a_token_that_was_said_lets_the_next_one_win(server, penalty):
    prompt = server.tokenizer.encode(PROMPT).ids
    said, next_one = server.tokens(max_tokens=1)[0], server.id_of("Ġbridge")

    def logprob_of(token: int) -> float:
        scored = server.complete([*prompt, said, token], 1, prompt_logprobs=0)
        return scored.choices[0].prompt_logprobs[-1][str(token)]["logprob"]

    # At the second token the first leads by 1, which a penalty of 2 turns around.
    lead = logprob_of(said) - logprob_of(next_one)
    bias = {str(said): 60.0, str(next_one): 60.0 + lead - 1.0}
    free = server.tokens(max_tokens=2, logit_bias=bias)
    assert free == [said, said]
    assert server.tokens(max_tokens=2, logit_bias=bias, **penalty) == [said, next_one]


def test_a_repetition_penalty_ends_a_repetition(server):
    token = server.id_of("Ġriver")
    answer = server.tokens(logit_bias={str(token): 60}, repetition_penalty=1000.0)
    assert answer.count(token) == 1


def test_bad_words_never_appear(server):
    # Whole tokens: vLLM bans a word with a space before it only where that is as many tokens as without.
    free = {
        token: server.tokenizer.decode([token])
        for token in server.tokens(max_tokens=16)
    }
    bad = {token: text for token, text in free.items() if re.match("[a-z]{2}", text)}
    assert bad
    answer = server.tokens(max_tokens=16, bad_words=list(bad.values()))
    assert not bad.keys() & set(answer)


def test_min_tokens_put_off_the_end(server):
    ending = {"logit_bias": {str(server.id_of("<｜end▁of▁sentence｜>")): 100}}
    assert server.complete(**ending).usage.completion_tokens == 1
    later = server.complete(min_tokens=5, **ending)
    assert later.choices[0].finish_reason == "stop"
    assert later.usage.completion_tokens == 6


def test_a_stop_string_ends_the_text_before_it(server):
    text = server.complete(max_tokens=16).choices[0].text
    stop = text[6:10]
    choice = server.complete(max_tokens=16, stop=[stop]).choices[0]
    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reason == "stop"
    assert choice.stop_reason == stop


def test_a_structured_answer_is_json_of_the_schema(server):
    schema = {
        "type": "object",
        "properties": {
            "river": {"enum": ["Seine", "Tiber"]},
            "bridges": {"type": "integer", "minimum": 1, "maximum": 40},
        },
        "required": ["river", "bridges"],
        "additionalProperties": False,
    }
    answer = server.chat(
        max_tokens=64,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "river", "schema": schema},
        },
        logit_bias=server.no_whitespace(),
        extra_body=NO_THINKING,
    )
    value = json.loads(answer.choices[0].message.content)
    assert value.keys() == {"river", "bridges"}
    assert value["river"] in ("Seine", "Tiber")
    assert 1 <= value["bridges"] <= 40


def test_a_prefix_hit_is_reported_in_whole_blocks(server):
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(300, 900, (300,), generator=generator).tolist()
    before = server.metric("vllm:prefix_cache_hits_total")
    first, second = (server.complete(prompt, 2) for _ in range(2))
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == 256
    assert server.metric("vllm:prefix_cache_hits_total") - before == 256
    assert server.metric("vllm:generation_tokens_total") > 0


def test_requests_at_the_same_time_all_get_the_answer_of_one_alone(server):
    answers = server.complete([PROMPT] * 4, 4, logprobs=1).choices
    alone = server.complete(max_tokens=4, logprobs=1).choices[0]
    for answer in answers:
        assert answer.token_ids[0] == alone.token_ids[0]
        assert answer.logprobs.token_logprobs[0] == pytest.approx(
            alone.logprobs.token_logprobs[0], abs=0.06
        )


def test_a_prompt_that_is_too_long_is_refused_and_the_next_one_is_served(server):
    with pytest.raises(openai.BadRequestError) as refused:
        server.complete(list(range(20, 520)) * 5)
    message = refused.value.body["message"]
    assert "2048" in message
    assert "\n" not in message
    assert server.complete().usage.completion_tokens == 8


def copy_of(checkpoint: Path, folder: Path) -> tuple[Path, Path]:
    """A copy, and its one shard."""
    copy = Path(shutil.copytree(checkpoint, folder / "bad"))
    (shard,) = copy.glob("*.safetensors")
    return copy, shard


def truncate(copy: Path, shard: Path) -> None:
    os.truncate(shard, shard.stat().st_size // 2)


def leave_out_a_tensor(copy: Path, shard: Path) -> None:
    tensors = load_file(shard)
    del tensors["layers.2.attn.wkv.weight"]
    save_file(tensors, shard)


def store_a_norm_as_integers(copy: Path, shard: Path) -> None:
    tensors = load_file(shard)
    tensors["layers.2.attn_norm.weight"] = torch.ones(256, dtype=torch.int32)
    save_file(tensors, shard)


def compress_five_tokens(copy: Path, shard: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["compress_ratios"][2] = 5
    (copy / "config.json").write_text(json.dumps(config))


FAULTS = {
    truncate: r"checkpoint: model-00001-of-00001\.safetensors is truncated: \d+ bytes, expected \d+\..*",
    leave_out_a_tensor: r"checkpoint: layers\.2\.attn\.wkv\.weight should be in model-00001-.*, but is in no shard\.",
    store_a_norm_as_integers: r"checkpoint: layers\.2\.attn_norm\.weight is I32, expected BF16, in model-00001-.*",
    compress_five_tokens: r"config: compress_ratios\[2\] = 5 is unknown; known are 0, 4 and 128\.",
}


@pytest.mark.parametrize("spoil", FAULTS, ids=lambda fault: fault.__name__)
def test_a_bad_checkpoint_is_refused_in_one_line_before_anything_starts(
    tiny_checkpoint, tmp_path, spoil
):
    from vllm.engine.arg_utils import EngineArgs

    from atom_vllm_bridge.platforms.refusal import Refused

    copy, shard = copy_of(tiny_checkpoint, tmp_path)
    spoil(copy, shard)
    with pytest.raises(Refused) as refused:
        EngineArgs(model=str(copy)).create_engine_config()
    assert re.fullmatch(f"atom-vllm-bridge: {FAULTS[spoil]}", str(refused.value))


def serve(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [VLLM, "serve", *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=90,
    )


def test_the_command_ends_with_the_line_of_a_refusal_alone(tiny_checkpoint):
    done = serve(
        str(tiny_checkpoint),
        "--additional-config",
        '{"atom": {"state_layot": "ring"}}',
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stderr.splitlines()[-1] == (
        'atom-vllm-bridge: "atom" in --additional-config has the unknown key '
        "'state_layot' (did you mean state_layout?). Known are model, ops, state_layout, prefix_rollback; "
        "remove the other."
    )


def test_an_additional_config_that_is_no_json_is_refused_in_one_line(tiny_checkpoint):
    done = serve(str(tiny_checkpoint), "--additional-config", '{"atom": {')
    assert done.returncode == 2
    usage, line = done.stderr.splitlines()[-2:]
    assert usage.startswith("usage: ")
    assert line.startswith(
        "vllm serve: error: argument --additional-config: '{\"atom\": {' is not JSON ("
    )
