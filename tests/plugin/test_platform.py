"""Which platform, runner and model class vLLM ends up with, and what is refused."""

import gc
import json
import logging
import os
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
from engines import prompt, running

from atom_vllm_bridge.platforms.refusal import Refused

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
}


def python(code: str, **environment: str) -> dict:
    """Run `code` in a fresh interpreter; its last line is JSON."""
    inherited = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("ATOM_BRIDGE", "VLLM", "TRITON"))
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=inherited | OFFLINE | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]) | {"stderr": done.stderr}


LOOK = """
    import json, os, sys
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.triton_utils import HAS_TRITON
    known = ModelRegistry.models["DeepseekV4ForCausalLM"]
    print(json.dumps({
        "platform": type(current_platform).__name__,
        "cpu": current_platform.is_cpu(),
        "model": known.module_name,
        "triton": HAS_TRITON,
        "interpret": os.environ.get("TRITON_INTERPRET"),
        "format": "atom_deepseek_v4" in QUANTIZATION_METHODS,
    }))
"""


def test_the_plugin_brings_platform_model_and_interpreter():
    found = python(LOOK)
    assert found["platform"] == "AtomCpuPlatform"
    assert found["cpu"]
    assert found["model"] == "atom_vllm_bridge.target"
    assert found["triton"]
    assert found["format"]


def test_disabled_it_leaves_vllm_as_if_it_were_not_there():
    disabled = python(LOOK, ATOM_BRIDGE_DISABLE="1")
    without = python(LOOK, VLLM_PLUGINS="")
    for found in (disabled, without):
        del found["stderr"]
    assert disabled == without
    assert disabled == {
        "platform": "CpuPlatform",
        "cpu": True,
        "model": "vllm.models.deepseek_v4",
        "triton": False,
        "interpret": None,
        "format": False,
    }


def test_an_unknown_vllm_is_refused_loudly_and_nothing_is_registered(
    monkeypatch, caplog
):
    from vllm.model_executor.models.registry import ModelRegistry

    from atom_vllm_bridge import compat, plugin

    monkeypatch.setattr(compat, "vllm_version", lambda: "0.99.0")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(
        ModelRegistry, "register_model", lambda *args: pytest.fail("registered")
    )
    with caplog.at_level("ERROR"), pytest.raises(RuntimeError, match=r"0\.99\.0"):
        plugin.register_platform()
    plugin.register_models()
    # Handlers of other tests may hear a record twice.
    lines = dict.fromkeys(record.getMessage() for record in caplog.records)
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("atom-vllm-bridge ")
        assert ">=0.32,<0.34" in line
        assert "\n" not in line


def test_registering_twice_has_a_single_effect():
    from vllm.model_executor.models.registry import ModelRegistry

    from atom_vllm_bridge import plugin

    assert plugin.register_platform() == plugin.register_platform()
    plugin.register_models()
    first = ModelRegistry.models["DeepseekV4ForCausalLM"]
    plugin.register_models()
    assert ModelRegistry.models["DeepseekV4ForCausalLM"] is first


def configuration(checkpoint, **options):
    from vllm.engine.arg_utils import EngineArgs

    settings = {"max_model_len": 512, "enforce_eager": True}
    return EngineArgs(
        model=str(checkpoint), **(settings | options)
    ).create_engine_config()


def test_a_copy_of_a_running_engines_configuration_is_no_new_request(small_checkpoint):
    """As FlashInfer's autotuning makes one on a GPU, to hash it: in the copy the planned block size looks asked for."""
    from vllm.config.utils import replace

    started = configuration(small_checkpoint)
    # A worker may get it from another process.
    for config in (started, pickle.loads(pickle.dumps(started))):
        config.cache_config.block_size = 4
        cache = replace(config.cache_config)
        assert cache.user_specified_block_size
        copy = replace(config, cache_config=cache)
        assert copy.cache_config.block_size == 4
        assert copy.compilation_config.mode == config.compilation_config.mode


def test_other_options_for_the_same_model_are_checked_and_completed(small_checkpoint):
    from vllm.config import CacheConfig, LoadConfig, VllmConfig

    model = configuration(small_checkpoint).model_config
    again = VllmConfig(model_config=model)
    assert again.cache_config.block_size == 128
    for options in (
        {"cache_config": CacheConfig(block_size=16)},
        {"load_config": LoadConfig(load_format="pt")},
    ):
        with pytest.raises(Refused):
            VllmConfig(model_config=model, **options)


def test_a_draft_is_not_unpickled_either(small_dspark):
    draft = {"method": "dspark", "num_speculative_tokens": 3}
    draft["draft_load_config"] = {"load_format": "npcache"}
    with pytest.raises(Refused, match="draft_load_config's load_format npcache"):
        configuration(small_dspark, speculative_config=draft)


def test_deepseek_v4_keeps_what_the_cpu_platform_switches_off(small_checkpoint):
    config = configuration(small_checkpoint)
    assert config.use_v2_model_runner
    assert config.scheduler_config.enable_chunked_prefill
    assert config.scheduler_config.async_scheduling
    assert config.scheduler_config.max_num_batched_tokens == 1024
    assert config.cache_config.enable_prefix_caching
    assert config.cache_config.block_size == 128
    assert config.cache_config.kv_cache_memory_bytes
    off = configuration(
        small_checkpoint,
        enable_prefix_caching=False,
        async_scheduling=False,
        max_num_batched_tokens=700,
        block_size=256,
    )
    assert not off.cache_config.enable_prefix_caching
    assert not off.scheduler_config.async_scheduling
    assert off.scheduler_config.max_num_batched_tokens == 700
    assert off.cache_config.block_size == 256


def asked(options) -> str:
    """As it is typed after `vllm serve DIR`."""
    words = []
    for name, value in options.items():
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(value if isinstance(value, str) else json.dumps(value))
    return " ".join(words)


REFUSED = [
    ({"dtype": "float16"}, "--dtype float16"),
    ({"block_size": 64}, "--block-size 64"),
    ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype fp8_e5m2"),
    ({"tensor_parallel_size": 4}, "o_groups = 2, of 4 heads"),
    (
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
        "--decode-context-parallel-size 2",
    ),
    (
        {"enable_expert_parallel": True, "all2all_backend": "deepep_low_latency"},
        "--all2all-backend deepep_low_latency",
    ),
    (
        {
            "enable_expert_parallel": True,
            "expert_placement_strategy": "round_robin",
        },
        "--expert-placement-strategy round_robin",
    ),
    (
        {
            "speculative_config": {
                "method": "ngram_gpu",
                "num_speculative_tokens": 2,
                "prompt_lookup_max": 2,
            }
        },
        "ngram_gpu",
    ),
    ({"quantization": "fp8"}, "--quantization fp8"),
    ({"cpu_offload_gb": 1}, "--cpu-offload-gb"),
    ({"load_format": "pt"}, "--load-format pt unpickles"),
    ({"enable_prompt_embeds": True}, "--enable-prompt-embeds"),
    ({"disable_hybrid_kv_cache_manager": True}, "--disable-hybrid"),
    ({"additional_config": {"atom": {"ops": "cuda"}}}, "'cuda'"),
    ({"additional_config": {"atom": {"state_layot": "paged"}}}, "state_layout"),
    ({"additional_config": {"atom": {"state_layout": "heap"}}}, "paged"),
    ({"enable_lora": True}, "--enable-lora"),
    (
        {
            "kv_transfer_config": {
                "kv_connector": "ExampleConnector",
                "kv_role": "kv_both",
            }
        },
        "--kv-transfer-config",
    ),
]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        pytest.param(
            options,
            named,
            marks=pytest.mark.refuses(asked=asked(options)),
            id=f"{next(iter(options))}-{named}",
        )
        for options, named in REFUSED
    ],
)
def test_what_cannot_be_honoured_is_refused_in_one_line(
    small_checkpoint, options, named, record_property
):
    with pytest.raises(Refused) as refused:
        configuration(small_checkpoint, **options)
    line = str(refused.value)
    record_property("refusal", line)
    assert line.startswith("atom-vllm-bridge: ")
    assert named in line
    assert "\n" not in line


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("enable_eplb", marks=pytest.mark.refuses(asked="--enable-eplb")),
        pytest.param(
            "enable_elastic_ep", marks=pytest.mark.refuses(asked="--enable-elastic-ep")
        ),
    ],
)
def test_experts_that_move_are_refused(
    small_checkpoint, monkeypatch, name, record_property
):
    """vLLM lets them through on GPUs alone."""
    from atom_vllm_bridge.platforms.base import refuse_what_cannot_be_honoured

    config = configuration(small_checkpoint)
    refuse_what_cannot_be_honoured(config)
    monkeypatch.setattr(config.parallel_config, name, True)
    with pytest.raises(Refused, match=f"--{name.replace('_', '-')} ") as refused:
        refuse_what_cannot_be_honoured(config)
    record_property("refusal", str(refused.value))
    assert "\n" not in str(refused.value)


@pytest.mark.refuses(
    asked='--tensor-parallel-size 2 --enable-expert-parallel --speculative-config {"method": "dspark", "draft_tensor_parallel_size": 1}'
)
def test_a_whole_draft_beside_split_experts_is_refused(small_dspark, record_property):
    with pytest.raises(Refused, match="draft_tensor_parallel_size 1") as refused:
        configuration(
            small_dspark,
            tensor_parallel_size=2,
            enable_expert_parallel=True,
            speculative_config={"method": "dspark", "draft_tensor_parallel_size": 1},
        )
    record_property("refusal", str(refused.value))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("method", ["dspark", "mtp"])
def test_a_draft_that_the_checkpoint_lacks_is_named(small_checkpoint, method):
    with pytest.raises(ValueError, match=f"{method} is asked for.*holds no such draft"):
        configuration(small_checkpoint, speculative_config={"method": method})


def test_the_setting_of_ops_reaches_the_model(small_checkpoint):
    from atom_vllm_bridge.models.ops import registry

    setting = {"atom": {"ops": "torch,rope=numba"}}
    try:
        with running(small_checkpoint, additional_config=setting) as engine:
            engine.generate([prompt(5)], max_tokens=2)
        chosen = {choice.op: choice.provider for choice in registry.table()}
        assert chosen.pop("rope") == "numba"
        assert set(chosen.values()) == {"torch"}
    finally:
        registry.configure("")


@pytest.mark.parametrize("qwen_first", [True, False])
def test_two_models_in_one_process_do_not_disturb_each_other(
    qwen, small_checkpoint, qwen_first
):
    """Both alive, in either order: each has its own runner."""
    found = python(f"""
        import json
        from vllm import LLM
        def runner(path, **options):
            llm = LLM(path, max_model_len=256, kv_cache_memory_bytes=1 << 27, enforce_eager=True, **options)
            engines.append(llm)
            core = llm.llm_engine.engine_core.engine_core
            return type(core.model_executor.driver_worker.worker.model_runner).__module__
        engines = []
        qwen = lambda: runner({str(qwen)!r}, skip_tokenizer_init=True)
        v4 = lambda: runner({str(small_checkpoint)!r})
        if {qwen_first}:
            print(json.dumps({{"qwen": qwen(), "v4": v4()}}))
        else:
            print(json.dumps({{"v4": v4(), "qwen": qwen()}}))
    """)
    assert found["qwen"] == "vllm.v1.worker.cpu_model_runner"
    assert found["v4"] == "vllm.v1.worker.cpu.model_runner"


def test_an_unknown_variable_ends_the_command_with_one_line():
    done = subprocess.run(
        [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "nothing"],
        env=os.environ | OFFLINE | {"ATOM_BRIDGE_OPSS": "torch"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "ATOM_BRIDGE_OPSS" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def serve(model, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    return subprocess.run(
        [*command, "--max-model-len", "512", *arguments],
        env=os.environ | OFFLINE | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("id", ["kernel-scan", "override-grid"])
def test_a_needed_patch_that_is_turned_off_ends_the_command_with_one_line(
    small_checkpoint, id
):
    done = serve(small_checkpoint, ATOM_BRIDGE_DISABLE_PATCH=id)
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stderr.splitlines()[-1] == (
        f"atom-vllm-bridge: ATOM_BRIDGE_DISABLE_PATCH turns the patch {id} off, and DeepSeek-V4 does not run on cpu "
        "without it. Leave it out there, or set ATOM_BRIDGE_DISABLE=1 to serve with vLLM's own model."
    )


def test_an_unknown_patch_ends_the_command_with_one_line():
    done = serve("nothing", ATOM_BRIDGE_DISABLE_PATCH="kernel-scam")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "'kernel-scam', which does not exist" in done.stderr.splitlines()[-1]


def test_a_patch_that_an_engine_can_do_without_may_be_turned_off(small_dspark):
    found = python(
        f"""
        import json
        from vllm.engine.arg_utils import EngineArgs
        from atom_vllm_bridge.patches import registry
        given = {{"method": "dspark", "num_speculative_tokens": 3}}
        EngineArgs(
            model={str(small_dspark)!r}, max_model_len=512, speculative_config=given
        ).create_engine_config()
        print(json.dumps({{p.id: str(registry.PATCHES.state(p.id)) for p in registry.load()}}))
        """,
        ATOM_BRIDGE_DISABLE_PATCH="draft-length,early-look",
    )
    off = "turned_off(by ATOM_BRIDGE_DISABLE_PATCH)"
    assert found["draft-length"] == found["early-look"] == off
    assert (
        f"needs num_speculative_tokens: patch draft-length is {off}" in found["stderr"]
    )


@pytest.mark.refuses(asked="VLLM_USE_V2_MODEL_RUNNER=0")
def test_model_runner_v1_is_refused_in_one_line(
    small_checkpoint, monkeypatch, record_property
):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(Refused, match="needs Model Runner V2") as refused:
        configuration(small_checkpoint)
    record_property("refusal", str(refused.value))
    assert "ATOM_BRIDGE_DISABLE=1" in str(refused.value)


def test_the_bridges_classes_serve_and_none_of_vllms_is_built(small_checkpoint):
    from atom_vllm_bridge.models.deepseek_v4.model import DeepseekV4Model
    from atom_vllm_bridge.target import AtomDeepseekV4ForCausalLM

    with running(small_checkpoint) as engine:
        assert type(engine.model) is AtomDeepseekV4ForCausalLM
        assert type(engine.model.model) is DeepseekV4Model
        seen = []
        handle = engine.model.model.register_forward_pre_hook(
            lambda module, args: seen.append(args[0].numel())
        )
        engine.generate([prompt(20)], max_tokens=4)
        handle.remove()
        # The prompt, then a token a step (asynchronous scheduling may run one step more).
        assert seen[0] == 20
        assert set(seen[1:]) == {1}
        built = {
            type(thing).__qualname__
            for thing in gc.get_objects()
            if type(thing).__module__.startswith("vllm.models.deepseek_v4")
            and isinstance(thing, torch.nn.Module)
        }
        assert not built


def test_the_package_imports_without_torch_or_vllm():
    found = python("""
        import json, sys
        import atom_vllm_bridge, atom_vllm_bridge.cli, atom_vllm_bridge.settings
        import atom_vllm_bridge.plugin, atom_vllm_bridge.engine_kernels
        heavy = [m for m in ("torch", "vllm", "triton", "aiter", "models") if m in sys.modules]
        print(json.dumps({"heavy": heavy}))
    """)
    assert found["heavy"] == []


QWEN = """
    import json, sys, time
    from vllm import LLM, SamplingParams
    llm = LLM(sys.argv[1] if len(sys.argv) > 1 else CHECKPOINT, skip_tokenizer_init=True,
              max_model_len=256, seed=0, kv_cache_memory_bytes=1 << 27)
    prompts = [{"prompt_token_ids": [(7 * i + 13 * j) % 500 + 1 for j in range(24)]} for i in range(4)]
    texts = []
    for sampling in (dict(temperature=0.0), dict(temperature=0.8, top_p=0.9, top_k=20, seed=1)):
        params = SamplingParams(max_tokens=16, ignore_eos=True, detokenize=False, **sampling)
        texts.append([list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)])
    config = llm.llm_engine.vllm_config
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    from vllm.triton_utils import HAS_TRITON
    print(json.dumps({
        "tokens": texts,
        "triton": HAS_TRITON,
        "v2": config.use_v2_model_runner,
        "runner": type(runner).__module__,
        "model": type(runner.model).__module__,
        "mode": str(config.compilation_config.mode),
        "backend": config.compilation_config.backend,
        "async": config.scheduler_config.async_scheduling,
        "block": config.cache_config.block_size,
        "attention": sorted({type(g.backend).__name__ + g.backend.__name__ for gs in runner.attn_groups for g in gs}),
    }))
"""


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A random Qwen3 of two layers."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("qwen")
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=1024,
        )
    ).to(torch.bfloat16).save_pretrained(path)
    return path


def test_another_model_keeps_runner_compile_mode_kernels_and_tokens(qwen):
    code = QWEN.replace("CHECKPOINT", repr(str(qwen)))
    with_plugin = python(code)
    without = python(code, VLLM_PLUGINS="")
    for found in (with_plugin, without):
        del found["stderr"]
    assert with_plugin == without
    assert not with_plugin["v2"]


def test_another_models_own_dspark_is_answered_as_without_the_plugin(qwen, tmp_path):
    """On a CPU vLLM refuses it, since its V1 runner has no DSpark: with the plugin just the same."""
    config = json.loads((qwen / "config.json").read_text())
    del config["layer_types"]
    config |= {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": 4,
        "num_hidden_layers": 1,
        "target_layer_ids": [1, 2],
        "mask_token_id": 511,
        "draft_vocab_size": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = f"""
        import json
        from vllm.engine.arg_utils import EngineArgs
        try:
            EngineArgs(model={str(qwen)!r}, skip_tokenizer_init=True, max_model_len=256,
                speculative_config={{"method": "dspark", "model": {str(tmp_path)!r}, "num_speculative_tokens": 3}},
            ).create_engine_config()
            answer = "accepted"
        except ValueError as error:
            answer = str(error)
        print(json.dumps({{"answer": answer}}))
    """
    with_plugin = python(code)["answer"]
    assert with_plugin == python(code, VLLM_PLUGINS="")["answer"]
    assert "dspark" in with_plugin
