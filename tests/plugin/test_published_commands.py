"""The commands that the field publishes for this model, as they are: each flag is honoured, or the start says what it became."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from engines import prompt
from published import COMMANDS, adaptive_command, parsed
from startup_logs import startup_table
from vllm import SamplingParams
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.llm_engine import LLMEngine
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from atom_vllm_bridge.patches.draft_length import ARCHITECTURE, fill_in_the_length
from atom_vllm_bridge.platforms.refusal import Refused


@pytest.fixture(scope="module")
def checkpoints(small_dspark, small_mtp, small_checkpoint):
    return {"dspark": small_dspark, "mtp": small_mtp, "none": small_checkpoint}


def configuration(checkpoint, text):
    args = AsyncEngineArgs.from_cli_args(parsed(checkpoint, text))
    return args.create_engine_config()


@pytest.mark.parametrize("which", COMMANDS)
def test_a_published_command_is_accepted(checkpoints, which):
    command = COMMANDS[which]
    config = configuration(checkpoints[command.draft], command.text)
    scheduler, compilation = config.scheduler_config, config.compilation_config
    assert config.speculative_config.method == command.draft
    assert scheduler.async_scheduling
    assert config.cache_config.enable_prefix_caching
    assert config.model_config.tokenizer_mode == "deepseek_v4"
    assert compilation.mode is CompilationMode.NONE
    assert compilation.cudagraph_mode is CUDAGraphMode.NONE


def test_the_flags_of_the_mtp_command_are_honoured(checkpoints):
    config = configuration(checkpoints["mtp"], COMMANDS["MTP"].text)
    speculative = config.speculative_config
    assert speculative.num_speculative_tokens == 3
    assert speculative.attention_backend is AttentionBackendEnum.ROCM_AITER_UNIFIED_ATTN
    assert config.cache_config.cache_dtype == "fp8"
    assert config.model_config.max_model_len == 4096
    assert config.model_config.trust_remote_code
    assert config.scheduler_config.max_num_batched_tokens == 8192
    assert config.scheduler_config.max_num_seqs == 256
    assert config.parallel_config.distributed_executor_backend == "mp"


def test_the_flags_of_the_dspark_command_are_honoured(checkpoints):
    config = configuration(checkpoints["dspark"], COMMANDS["DSpark"].text)
    assert config.speculative_config.num_speculative_tokens == 7
    assert config.model_config.served_model_name == "dsv4flash"
    assert config.model_config.max_model_len == 32768
    assert config.model_config.trust_remote_code
    assert config.scheduler_config.max_num_batched_tokens == 16384
    assert config.cache_config.cache_dtype == "fp8"
    assert config.cache_config.gpu_memory_utilization == 0.8
    assert config.kernel_config.moe_backend == "aiter"


def test_the_parsers_that_are_named_are_those_of_deepseek_v4(checkpoints):
    mtp = parsed(checkpoints["mtp"], COMMANDS["MTP"].text)
    dspark = parsed(checkpoints["dspark"], COMMANDS["DSpark"].text)
    tool = ToolParserManager.get_tool_parser(mtp.tool_call_parser)
    assert "DeepSeekV4" in tool.__name__
    name = dspark.structured_outputs_config.reasoning_parser or dspark.reasoning_parser
    assert "DeepSeekV4" in ReasoningParserManager.get_reasoning_parser(name).__name__


def test_the_adaptive_dspark_command_is_accepted(checkpoints):
    config = configuration(checkpoints["dspark"], adaptive_command())
    assert config.speculative_config.enable_adaptive_verification
    assert config.compilation_config.cudagraph_mode is CUDAGraphMode.FULL_DECODE_ONLY


@pytest.mark.refuses(spec="adaptive", graphs="none", on="a GPU")
def test_adaptive_verification_without_graphs_is_refused_in_one_line(
    checkpoints, monkeypatch, record_property
):
    """As on a GPU with --enforce-eager; a CPU has no graphs to turn off."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(
        type(current_platform), "graph_mode", lambda config: CUDAGraphMode.NONE
    )
    with pytest.raises(Refused) as refused:
        configuration(checkpoints["dspark"], adaptive_command())
    line = str(refused.value)
    record_property("refusal", line)
    assert line.startswith(
        "atom-vllm-bridge: enable_adaptive_verification needs full graphs of decode steps"
    )
    assert "\n" not in line


@contextmanager
def started(checkpoint, text):
    """The engine of the command in this process, in 1 GiB of cache instead of a share of the machine's memory."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    text = text.replace("--distributed-executor-backend mp", "")
    text += " --kv-cache-memory-bytes 1G"
    engine = LLMEngine.from_engine_args(
        AsyncEngineArgs.from_cli_args(parsed(checkpoint, text))
    )
    try:
        yield engine
    finally:
        engine.engine_core.shutdown()
        del engine
        cleanup_dist_env_and_memory()


@pytest.mark.parametrize("which", COMMANDS)
def test_the_start_says_what_each_flag_became(checkpoints, which):
    """And the engine answers a prompt that is longer than a step of the smallest."""
    command = COMMANDS[which]
    with (
        startup_table() as table,
        started(checkpoints[command.draft], command.text) as engine,
    ):
        params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0)
        engine.add_request("0", {"prompt_token_ids": prompt(1500)}, params)
        answers = []
        while engine.has_unfinished_requests():
            answers += engine.step()
    assert len(answers[-1].outputs[0].token_ids) == 4
    for what, said in command.table.items():
        if "{}" in said:
            provider = table[what].rsplit(" ", 1)[1]
            assert provider in ("torch", "numba")
            said = said.format(provider)
        assert table[what] == said, what
    assert "draft-length applied" in table["patches"]


# ------------------------------------------------------------------------------------------------- the patch


@pytest.mark.parametrize(
    ("draft", "options", "length"),
    [
        ("dspark", """--speculative-config '{"method":"dspark"}'""", 5),
        ("dspark", "--spec-method dspark", 5),
        ("dspark", "--spec-method dspark --spec-tokens 3", 3),
        ("mtp", "--spec-method mtp", 1),
        ("mtp", """--speculative-config '{"method":"mtp","draft-sample-method":"greedy"}'""", 1),
        ("dspark", """--speculative-config '{"method":"dspark","num-speculative-tokens":2}'""", 2),
        ("dspark", """--speculative-config '{"method":"dspark"}' --spec-tokens 4""", 4),
    ],
)  # fmt: skip
def test_a_method_alone_takes_the_length_that_its_draft_was_trained_for(
    checkpoints, draft, options, length
):
    config = configuration(checkpoints[draft], options)
    assert config.speculative_config.method == draft
    assert config.speculative_config.num_speculative_tokens == length
    assert config.speculative_config.model == str(checkpoints[draft])


@pytest.mark.parametrize(
    ("holds", "asked", "key"),
    [
        ("none", "dspark", "dspark_block_size"),
        ("mtp", "dspark", "dspark_block_size"),
    ],
)
def test_a_method_that_the_checkpoint_does_not_hold_is_refused_in_one_line(
    checkpoints, holds, asked, key
):
    with pytest.raises(
        ValueError, match=f"no {key}.*Name the method that it has"
    ) as no:
        configuration(checkpoints[holds], f"--spec-method {asked}")
    assert str(no.value).startswith("atom-vllm-bridge: ")
    assert "\n" not in str(no.value)


def patched(speculative, architecture=ARCHITECTURE, **flags):
    """What vLLM's own function is handed by the patch, for a checkpoint of 5 DSpark tokens and 2 MTP layers."""
    seen = []
    wrapped = fill_in_the_length(lambda self, *_: seen.append(self.speculative_config))
    hf = SimpleNamespace(dspark_block_size=5, num_nextn_predict_layers=2)
    target = SimpleNamespace(architectures=[architecture], hf_config=hf)
    empty = {"spec_method": None, "spec_model": None, "spec_tokens": None}
    given = SimpleNamespace(speculative_config=speculative, **(empty | flags))
    wrapped(given, target, None)
    return seen[0]


def test_the_patch_fills_in_a_length_and_nothing_else():
    assert patched({"method": "dspark"}) == {
        "method": "dspark",
        "num_speculative_tokens": 5,
    }
    assert patched({"method": "mtp"})["num_speculative_tokens"] == 2
    assert patched(None, spec_method="dspark") == {"num_speculative_tokens": 5}


@pytest.mark.parametrize(
    "complete",
    [
        None,
        {"method": "dspark", "num_speculative_tokens": 3},
        {"method": "dspark", "num-speculative-tokens": 3},
        {"method": "dspark", "model": "elsewhere"},
        {"method": "ngram", "num_speculative_tokens": 3},
        {"method": "ngram"},
    ],
    ids=str,
)
def test_the_patch_leaves_alone_what_is_complete_or_none_of_its_business(complete):
    before = complete and dict(complete)
    assert patched(complete) == before


def test_the_patch_leaves_other_models_alone():
    alone = {"method": "dspark"}
    assert patched(dict(alone), architecture="Qwen3ForCausalLM") == alone
