"""Triton's interpreter as the CPU backend of Model Runner V2.

The runner is written in Triton, and the Triton of PyPI compiles for GPUs only.
Its interpreter runs a kernel with numpy, one program after another: slow, and
exact. `install` makes it count as the "cpu" backend that vLLM looks for, so that
every engine kernel runs; the hot ones are then replaced (see the package).
"""

import importlib
import importlib.util
import os
import sys
from typing import Any

BACKEND = "cpu"
SWITCH = "TRITON_INTERPRET"


def install() -> str:
    """Give Triton a CPU backend; call it before vllm.triton_utils is imported.

    Imports Triton, neither torch nor vllm. A second call changes nothing.

    Returns:
        "interpreter", or "compiled" if this Triton has a CPU backend of its own,
        which is then left alone.

    Raises:
        RuntimeError: Triton is missing, or vLLM has already decided that there is
            none.
    """
    if importlib.util.find_spec("triton") is None:
        raise RuntimeError(
            "engine kernels: Model Runner V2 needs Triton, which is not installed. "
            "Run: pip install triton"
        )
    switch_before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "1"
    registered = importlib.import_module("triton.backends").backends
    if BACKEND in registered and registered[BACKEND].driver.__module__ != __name__:
        if switch_before is None:
            del os.environ[SWITCH]
        else:
            os.environ[SWITCH] = switch_before
        return "compiled"
    _refuse_if_too_late()
    _redecorate_library()
    _keep_bools_when_spread()
    if BACKEND not in registered:
        registered[BACKEND] = _make_backend()
    return "interpreter"


def is_installed() -> bool:
    """Whether the interpreter serves as the CPU backend in this process."""
    backends = sys.modules.get("triton.backends")
    if backends is None or BACKEND not in backends.backends:
        return False
    return bool(backends.backends[BACKEND].driver.__module__ == __name__)


def _redecorate_library() -> None:
    # triton.jit looks at the switch when it decorates, and `import vllm` imports
    # Triton (through torch) before it loads plugins: Triton's own library must be
    # decorated again. A reload keeps each module object, so that every
    # `import triton.language as tl` sees the new functions.
    interpreter = importlib.import_module("triton.runtime.interpreter")
    language = importlib.import_module("triton.language")
    if isinstance(language.sum, interpreter.InterpretedFunction):
        return
    importlib.reload(importlib.import_module("triton.language.standard"))
    importlib.reload(importlib.import_module("triton.language.random"))
    importlib.reload(language)


def _keep_bools_when_spread() -> None:
    # In Triton 3.9 a comparison keeps the type of what it compared on its data, and
    # spreading one truth value over a block makes numbers of that type, which then
    # fail as a mask ("mask has unsupported dtype") or under "&".
    interpreter = importlib.import_module("triton.runtime.interpreter")
    int1 = importlib.import_module("triton.language").int1
    builder = interpreter.InterpreterBuilder
    if hasattr(builder, "_atom_bridge_spread"):
        return
    splat = builder.create_splat

    def create_splat(self: Any, ret_ty: Any, arg: Any) -> Any:
        if arg.data.dtype == bool:
            arg = interpreter.TensorHandle(arg.data, int1)
        return splat(self, ret_ty, arg)

    builder.create_splat = create_splat
    builder._atom_bridge_spread = True


def _refuse_if_too_late() -> None:
    # While that module is being imported (it asks for the platform, which loads the
    # plugin) it has not decided yet.
    triton_utils = sys.modules.get("vllm.triton_utils.importing")
    if getattr(triton_utils, "HAS_TRITON", True) is False:
        raise RuntimeError(
            "engine kernels: vllm.triton_utils was imported, and found no CPU backend "
            "of Triton, before the plugin was loaded. Import vllm.platforms first."
        )


def _make_backend() -> Any:
    """A backend that is always active and compiles nothing.

    torch.compile asks it for a target, a hash and options (to key its cache) even
    when it generates C++; a request to compile a kernel raises.
    """
    backends = importlib.import_module("triton.backends")
    compiler = importlib.import_module("triton.backends.compiler")
    driver = importlib.import_module("triton.backends.driver")
    target = compiler.GPUTarget(BACKEND, "interpreter", 1)

    class InterpreterDriver(driver.DriverBase):  # type: ignore[name-defined]
        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            raise _compiles_nothing(f"a launcher that takes {ty}")

        def get_current_target(self) -> Any:
            return target

        def get_current_device(self) -> int:
            return 0

        def get_active_torch_device(self) -> Any:
            return importlib.import_module("torch").device("cpu")

        def get_benchmarker(self) -> Any:
            return importlib.import_module("triton.testing").do_bench

    class InterpreterCompiler(compiler.BaseBackend):  # type: ignore[name-defined]
        binary_ext = "none"

        @staticmethod
        def supports_target(target: Any) -> bool:
            return bool(target.backend == BACKEND)

        def hash(self) -> str:
            return "interpreter"

        def parse_options(self, options: dict[str, Any]) -> Any:
            interpreter = importlib.import_module("triton.runtime.interpreter")
            return interpreter.InterpreterOptions()

        def add_stages(self, stages: Any, options: Any, language: Any) -> None:
            raise _compiles_nothing("a kernel")

        def load_dialects(self, context: Any) -> None:
            raise _compiles_nothing("a kernel")

        def get_module_map(self) -> dict[str, Any]:
            return {}

    return backends.Backend(compiler=InterpreterCompiler, driver=InterpreterDriver)


def _compiles_nothing(what: str) -> RuntimeError:
    return RuntimeError(
        f"engine kernels: asked to compile {what} for the CPU, where Triton is only "
        f"interpreted. Keep {SWITCH}=1 in the environment."
    )
