"""What is asked of vLLM on simulated AMD GPUs; see simulated_rocm.py. Each function runs in a process of its own."""

import logging
import os
from typing import Any

ARCHITECTURES = ("DeepseekV4ForCausalLM", "DSparkDraftModel", "DeepSeekV4MTPModel", "Qwen3ForCausalLM")  # fmt: skip


def who_serves(worker: bool = False) -> dict[str, Any]:
    """The platform and the classes once all entry points have run, as the front end or a worker finds them."""
    from importlib.metadata import entry_points

    from vllm.platforms import current_platform, resolve_current_platform_cls_qualname

    chosen = resolve_current_platform_cls_qualname()
    assert f"{type(current_platform).__module__}.{type(current_platform).__name__}" == (
        chosen
    )
    from vllm.plugins import load_general_plugins

    said = _listen()
    load_general_plugins()
    if worker:
        current_platform.register_triton_kernel_overrides()
    else:
        current_platform.pre_register_and_update()
    from vllm.model_executor.models.registry import ModelRegistry

    return {
        "chosen": chosen,
        "kinds": [kind.__name__ for kind in type(current_platform).__mro__],
        "classes": {
            name: ModelRegistry.models[name].module_name for name in ARCHITECTURES
        },
        "said": said,
        "order": [point.name for point in entry_points(group="vllm.general_plugins")],
    }


def _listen() -> list[str]:
    """Lines of ours from now on."""
    lines: list[str] = []
    logger, handler = logging.getLogger("vllm.atom_vllm_bridge"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return lines


def what_became(checkpoints: dict[str, str], asked: list[list[Any]]) -> dict[str, Any]:
    """What becomes of options of `vllm serve`.

    Args:
        checkpoints: by name.
        asked: triples of a checkpoint's name, options and environment.

    Returns:
        "became", one for each; of one that is refused, its text.
    """
    return {
        "became": [
            _configured(checkpoints[name], text, environment)
            for name, text, environment in asked
        ]
    }


def who_configures(checkpoints: dict[str, str], options: str) -> dict[str, Any]:
    """The configurations that ATOM's platform has seen, of all those that were made; and what became of them."""
    from vllm.model_executor.models import registry

    # Another process would lack what is simulated here.
    registry._run_in_subprocess = lambda inspect: inspect()
    became = {
        name: _configured(path, options, {}) for name, path in checkpoints.items()
    }
    from atom.plugin.vllm.platform import ATOMPlatform

    return {"seen": ATOMPlatform.configured, "became": became}


def whose_model(checkpoints: dict[str, str], asked: list[list[Any]]) -> dict[str, Any]:
    """Whose DeepSeek-V4 a configuration is made for.

    Args:
        checkpoints: by name.
        asked: triples of a checkpoint's name, options (an object: what Python passes to an engine) and environment.

    Returns:
        "became", one for each, with what the process and its platform made of it; of one that is refused, its text.
    """
    from vllm.model_executor.models import registry

    # Another process would lack what is simulated here.
    registry._run_in_subprocess = lambda inspect: inspect()
    became = []
    for name, options, environment in asked:
        before = dict(os.environ)
        os.environ.update(environment)
        try:
            became.append(_whose(checkpoints[name], options))
        except (RuntimeError, ValueError) as error:
            became.append({"refused": str(error)})
        finally:
            os.environ.clear()
            os.environ.update(before)
    return {"became": became}


def _whose(model: str, options: Any) -> dict[str, Any]:
    from published import parsed
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.platforms import current_platform

    small = {"skip_tokenizer_init": True, "max_model_len": 512}
    if isinstance(options, str):
        args = AsyncEngineArgs.from_cli_args(parsed(model, options))
    else:
        args = AsyncEngineArgs(model=model, **options)
    for key, value in small.items():
        setattr(args, key, value)
    # vLLM's platforms have None for what they do not know.
    already = len(current_platform.configured or [])
    config = args.create_engine_config()
    speculative = config.speculative_config
    return {
        "classes": {
            name: ModelRegistry.models[name].module_name for name in ARCHITECTURES
        },
        "configured by ATOM": (current_platform.configured or [])[already:],
        "pipelines": config.model_config._model_info.supports_pp,
        "quantization": config.model_config.quantization,
        "draft": speculative and speculative.num_speculative_tokens,
        "mode": config.compilation_config.mode.name,
        "graphs": config.compilation_config.cudagraph_mode.name,
        "worker": config.parallel_config.worker_cls,
        "v2": config.use_v2_model_runner,
        "inherited": os.environ.get("ATOM_BRIDGE_MODEL"),
        "for Ray": list(current_platform.additional_env_vars),
    }


def _configured(model: str, text: str, environment: dict[str, str]) -> dict[str, Any]:
    from published import parsed
    from vllm.engine.arg_utils import AsyncEngineArgs

    before = dict(os.environ)
    os.environ.update(environment)
    try:
        args = AsyncEngineArgs.from_cli_args(parsed(model, text))
        config = args.create_engine_config()
        return _summary(config) | {
            "kept": {name: os.environ.get(name) for name in environment},
            "breakable": os.environ.get("VLLM_USE_BREAKABLE_CUDAGRAPH"),
        }
    except (RuntimeError, ValueError) as error:
        return {"refused": str(error)}
    finally:
        os.environ.clear()
        os.environ.update(before)


def _summary(config: Any) -> dict[str, Any]:
    from atom_vllm_bridge import startup

    compilation, speculative = config.compilation_config, config.speculative_config
    return {
        "class": config.model_config.architecture,
        "mode": compilation.mode.name,
        "graphs": compilation.cudagraph_mode.name,
        "worker": config.parallel_config.worker_cls,
        "v2": config.use_v2_model_runner,
        "attention": _name(config.attention_config.backend),
        "draft attention": speculative and _name(speculative.attention_backend),
        "experts": config.kernel_config.moe_backend,
        "asked": config.additional_config.get(startup.ASKED),
    }


def _name(member: Any) -> str | None:
    return member and member.name
