"""vLLM on eight MI355X that are not there, and ROCm/ATOM's distribution with stand-ins for what it brings.

vLLM asks `amdsmi` for GPUs and Triton's AMD driver whether it is active: both answer here. Each question, a function of the
module `rocm_questions`, is put in a process of its own, forked from one that has imported what is neither vLLM's nor ours.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

AMDSMI = """
class AmdSmiException(Exception): ...
class AmdSmiMemoryType:
    VRAM = 0
def amdsmi_init(): ...
def amdsmi_shut_down(): ...
def amdsmi_get_processor_handles(): return list(range(8))
def amdsmi_get_gpu_asic_info(handle):
    return {"target_graphics_version": "gfx950", "device_id": "0x75a0", "market_name": "AMD Instinct MI355X"}
def amdsmi_get_gpu_device_uuid(handle): return f"GPU-{handle}"
def amdsmi_get_gpu_memory_total(handle, kind): return 288 << 30
def amdsmi_topo_get_link_type(one, other): return {"hops": 1, "type": 2}
def amdsmi_topo_get_numa_node_number(handle): return 0
"""

SIGNATURES = Path(__file__).parent / "atom_signatures"

REGISTER = """
import os
ARCHITECTURES = {architectures!r}
OFF = os.environ.get("ATOM_DISABLE_VLLM_PLUGIN") == "1"
def register_platform():
    return None if OFF else "atom.plugin.vllm.platform.ATOMPlatform"
def register_model():
    if OFF:
        return
    from vllm.model_executor.models.registry import ModelRegistry
    for architecture, path in ARCHITECTURES.items():
        ModelRegistry.register_model(architecture, path)
"""
PLATFORM = """
from vllm.platforms.rocm import RocmPlatform
class ATOMPlatform(RocmPlatform):
    configured = []
    @classmethod
    def check_and_update_config(cls, vllm_config):
        super().check_and_update_config(vllm_config)
        ATOMPlatform.configured += vllm_config.model_config.architectures
"""
DISTRIBUTION = {
    "atom-0.1.3.dist-info/METADATA": "Metadata-Version: 2.1\nName: atom\nVersion: 0.1.3\n",
    "atom-0.1.3.dist-info/entry_points.txt": """
[vllm.platform_plugins]
atom = atom.plugin.vllm.register:register_platform

[vllm.general_plugins]
atom_model_registry = atom.plugin.vllm.register:register_model
""",
}


def atom_files(
    version: str = "later", changed: tuple[str, str] = ("", "")
) -> dict[str, str]:
    """Name → text of the files of ATOM's distribution, made of published signatures (atom_signatures/).

    Args:
        version: of the signatures.
        changed: a text in them, and what stands in its place.
    """
    text = (SIGNATURES / f"{version}.json").read_text()
    assert changed[0] in text
    read = json.loads(text.replace(*changed) if changed[0] else text)
    modules: dict[str, str] = {}
    for path, entry in read["classes"].items():
        module, name = path.split(":")
        source = modules.get(module, "")
        bases = []
        for number, base in enumerate(entry["bases"]):
            origin, kind = base.split(":")
            bases.append(kind if origin == module else f"{kind}{number}")
            if origin != module:
                source += f"from {origin} import {kind} as {bases[-1]}\n"
        source += f"class {name}({', '.join(bases)}):\n    pass\n"
        for method, signature in entry["methods"].items():
            source += f"    def {method}{signature}: ...\n"
        modules[module] = source
    architectures = read["architectures"]["classes"]
    modules["atom.plugin.vllm.register"] = REGISTER.format(architectures=architectures)
    modules["atom.plugin.vllm.platform"] = PLATFORM
    files = {f"{module.replace('.', '/')}.py": text for module, text in modules.items()}
    packages = ("atom", "atom/plugin", "atom/plugin/vllm")
    return {f"{name}/__init__.py": "" for name in packages} | files | DISTRIBUTION


ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
}


def lay_out(folder: Path, **of_atom: Any) -> tuple[Path, Path]:
    """Two folders for `sys.path`: with `amdsmi`, and with ATOM's distribution, of which `of_atom` says more."""
    gpus, atom = folder / "gpus", folder / "atom"
    files_of = {gpus: {"amdsmi.py": AMDSMI}, atom: atom_files(**of_atom)}
    for root, files in files_of.items():
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
    return gpus, atom


def ask(*questions: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The answers, each with what was logged under "log".

    Args:
        questions: each with "name", and optionally "arguments" (JSON), "environment", "broken", a module that cannot be imported,
            and "first" and "last", folders to put before and after all others on `sys.path`.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ATOM_", "VLLM", "TRITON", "AITER", "SAFETENSORS"))
    }
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(questions),
        env=inherited | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def _answer(question: Mapping[str, Any], path: Path) -> None:
    os.environ.update(question.get("environment", {}))
    if "broken" in question:
        sys.modules[question["broken"]] = None  # type: ignore[assignment]
    sys.path[:0] = question.get("first", [])
    sys.path += question.get("last", [])
    with path.open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    from triton.backends.amd.driver import HIPDriver

    HIPDriver.is_active = staticmethod(lambda: True)
    from vllm import platforms

    # The build that is installed has "cpu" in its version, and vLLM asks for nothing else of it.
    platforms.vllm_version_matches_substr = lambda part: False
    import rocm_questions

    answer = getattr(rocm_questions, question["name"])(**question.get("arguments", {}))
    path.with_suffix(".json").write_text(json.dumps(answer))


def _serve(questions: list[Mapping[str, Any]]) -> None:
    import tempfile
    import traceback

    # Slow to import, and none of them asks for a platform.
    import openai
    import sklearn
    import torch._dynamo
    import torch._inductor.lowering
    import transformers.modeling_utils
    import triton

    assert "vllm" not in sys.modules
    del openai, sklearn, torch, transformers, triton
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        for index, question in enumerate(questions):
            log = Path(folder) / f"{index}.log"
            if (child := os.fork()) == 0:
                code = 1
                try:
                    _answer(question, log)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    # Without the exit handlers of what was imported before the fork.
                    os._exit(code)
            if os.waitpid(child, 0)[1] != 0:
                sys.exit(f"{question}:\n{log.read_text()}")
            answer = json.loads(log.with_suffix(".json").read_text())
            answers.append(answer | {"log": log.read_text()})
    print(json.dumps(answers))


if __name__ == "__main__":
    _serve(json.loads(sys.stdin.read()))
