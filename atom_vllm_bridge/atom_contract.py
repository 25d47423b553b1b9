"""What vLLM and ATOM's own wrapper call of ATOM's DeepSeek-V4, held against the installed ATOM's sources.

Read and not imported: an import starts aiter, and with it the GPU, in the process that is to fork others.
"""

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MODEL = "atom.models.deepseek_v4:DeepseekV4ForCausalLM"


@dataclass(frozen=True)
class Call:
    """
    Attributes:
        names: of the arguments that go by name.
        places: how many go by place.
    """

    names: tuple[str, ...] = ()
    places: int = 0


# By vLLM, of a class that ATOM registers.
OF_WRAPPERS = {
    "__init__": Call(("vllm_config", "prefix")),
    "forward": Call(
        ("input_ids", "positions", "intermediate_tensors", "inputs_embeds")
    ),
    "compute_logits": Call(places=1),
    "load_weights": Call(places=1),
}
# By the wrapper, of the model in it.
OF_THE_MODEL = {
    "__init__": Call(places=1),
    "forward": Call(("input_ids", "positions")),
    "compute_logits": Call(places=1),
}


def lack(*wrappers: str) -> str | None:
    """The first class, method or parameter that is not as it is called; None if all are.

    Args:
        wrappers: the classes that ATOM registered, each "module:class".
    """
    for path in (*wrappers, MODEL):
        classes = list(_line(*path.split(":")))
        if not classes:
            return f"has no {path}"
        for method, call in (OF_THE_MODEL if path == MODEL else OF_WRAPPERS).items():
            found = next((f for c in classes if (f := _function(c, method))), None)
            if found is None:
                return f"has no {path}.{method}"
            if fault := _fault(found.args, call):
                return f"has {path}.{method} {fault}"
    return None


def _line(module: str, name: str) -> Iterator[ast.ClassDef]:
    """A class and those of its bases that are ATOM's, nearest first."""
    for node in _tree(module).body if module.startswith("atom.") else ():
        if isinstance(node, ast.ClassDef) and node.name == name:
            yield node
            for base in node.bases:
                if isinstance(base, ast.Name):
                    yield from _line(module, base.id)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    origin = "." * node.level + (node.module or "")
                    package = module.rpartition(".")[0]
                    yield from _line(
                        importlib.util.resolve_name(origin, package), alias.name
                    )


@cache
def _tree(module: str) -> ast.Module:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        return ast.Module([], [])
    return ast.parse(Path(spec.origin).read_bytes())


def _function(node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    for child in node.body:
        if isinstance(child, ast.FunctionDef) and child.name == name:
            return child
    return None


def _fault(args: ast.arguments, call: Call) -> str | None:
    """Why a method does not take the call. What would end in a `**kwargs` that knows nothing of it counts as not taken."""
    places = [arg.arg for arg in (*args.posonlyargs, *args.args)][1:]
    for name in call.names:
        if name not in places + [arg.arg for arg in args.kwonlyargs]:
            return f"without the parameter {name}"
    if len(places) < call.places and args.vararg is None:
        return f"with {len(places)} parameters, and {call.places} are passed"
    needed = places[call.places : len(places) - len(args.defaults)]
    needed += [
        arg.arg
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
        if default is None
    ]
    for name in needed:
        if name not in call.names:
            return f"with the parameter {name}, which is not passed"
    return None
