"""What our code takes from vLLM, found by walking it: a line for each thing that the vLLM asked does not have.

Followed are names imported from vLLM, their attributes, what annotations of ours say is an object of vLLM's (through as many
attributes as vLLM's own annotations lead on), calls of all these, classes derived from vLLM's, and texts that name something
in vLLM. What is read by `getattr` or `hasattr` is a probe, and asked of nothing.
"""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from contracts.signatures import parameters, signature, text_of, unlike
from contracts.sources import Answer
from contracts.table import MIXINS, TYPES

Ask = Callable[[str], Answer]
PATH = re.compile(r"vllm(\.\w+)+(:\w+(\.\w+)*)?")
# Texts of that form that name nothing in vLLM's code: entry points, and our logger.
OTHER_TEXTS = {
    "vllm.platform_plugins",
    "vllm.general_plugins",
    "vllm.atom_vllm_bridge",
}
OF_ENUMS = ("name", "value")


class Unrecorded(LookupError):
    """A question that the answers kept of a vLLM do not include."""


@dataclass(frozen=True)
class Type:
    """What an expression is.

    Attributes:
        kind: "module", "class", "object", "items" (a container of objects), "function" or "ours".
        path: of vLLM's, as in a question; of ours, the class's name.
    """

    kind: str
    path: str


@dataclass
class OurClass:
    """A class of ours; `bases` are vLLM's, `names` its own and those of bases of ours."""

    node: ast.ClassDef
    bases: list[str]
    open: bool
    names: set[str]
    types: dict[str, Type] = field(default_factory=dict)


def faults_of_uses(files: dict[str, Path], ask: Ask) -> list[str]:
    """A line for each thing of vLLM's that `files`, our modules by name, use and that is not there."""
    faults = []
    for name, path in files.items():
        text = path.read_text(encoding="utf-8")
        if re.search(r"\bvllm\b", text):
            faults += Module(name, text, ask).faults()
    return faults


parsed = cache(ast.parse)


class Module(ast.NodeVisitor):
    """One module of ours."""

    def __init__(self, name: str, text: str, ask: Ask) -> None:
        self._name, self._ask_ = name, ask
        self._tree = parsed(text)
        self._faults: list[str] = []
        self._classes: dict[str, OurClass] = {}
        self._scopes: list[dict[str, Type | None]] = [{}]
        # Expressions that the function being walked asks the class of, or sets.
        self._narrowed: set[str] = set()

    def faults(self) -> list[str]:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.ClassDef):
                self._declare(node)
        self.visit(self._tree)
        return self._faults

    def _fault(self, node: ast.AST, line: str) -> None:
        self._faults.append(f"{self._name}:{getattr(node, 'lineno', 0)}: {line}")

    def _ask(self, node: ast.AST, question: str) -> dict[str, Any] | None:
        try:
            answer = self._ask_(question)
        except Unrecorded:
            self._fault(node, f"{question} is new here: record the answers again.")
            return {"is": "unknown"}
        assert not isinstance(answer, str)
        return answer

    # Names.

    def _lookup(self, name: str) -> Type | None:
        for scope in reversed(self._scopes):
            if name in scope:
                return scope[name]
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if (node.module or "").split(".")[0] != "vllm" or node.level:
            return
        for alias in node.names:
            question = f"{node.module}:{alias.name}"
            answer = self._ask(node, question)
            if answer is None:
                self._fault(node, f"vLLM has no {question}.")
            self._scopes[-1][alias.asname or alias.name] = _type_of(answer, question)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] == "vllm" and not self._ask(
                node, f"{alias.name}:"
            ):
                self._fault(node, f"vLLM has no module {alias.name}.")

    def visit_Constant(self, node: ast.Constant) -> None:
        text = node.value
        if (
            isinstance(text, str)
            and PATH.fullmatch(text)
            and text not in OTHER_TEXTS
            and not any(self._ask(node, question) for question in readings(text))
        ):
            self._fault(node, f"vLLM has no {text}.")

    # Classes.

    def _declare(self, node: ast.ClassDef) -> None:
        names = {name for s in ast.walk(node) for name in _defined(s)}
        ours = OurClass(node, [], node.name in MIXINS, names)
        if node.name in MIXINS:
            ours.bases.append(MIXINS[node.name])
        self._classes[node.name] = ours

    def _complete(self, node: ast.ClassDef) -> OurClass:
        ours = self._classes[node.name]
        for base in node.bases:
            if isinstance(base, ast.Subscript):
                base = base.value
            found = self._infer(base)
            if found is not None and found.kind == "class":
                ours.bases.append(found.path)
            elif isinstance(base, ast.Name) and base.id in self._classes:
                parent = self._classes[base.id]
                ours.names |= parent.names
                ours.bases += parent.bases
                ours.open |= parent.open
                ours.types |= parent.types
            else:
                ours.open = True
        for path in ours.bases:
            answer = self._ask(node, path)
            ours.open |= bool(answer and answer.get("open"))
        return ours

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        ours = self._complete(node)
        methods = [s for s in node.body if isinstance(s, ast.FunctionDef)]
        for method in methods:
            self._check_override(ours, method)
        # What __init__ keeps is known to the other methods.
        methods.sort(key=lambda method: method.name != "__init__")
        for statement in node.body:
            if not isinstance(statement, ast.FunctionDef):
                self.visit(statement)
        for method in methods:
            self.visit_FunctionDef(method, ours)

    def _check_override(self, ours: OurClass, method: ast.FunctionDef) -> None:
        name = method.name
        if name == "__init__" or "overload" in map(ast.unparse, method.decorator_list):
            return
        for base in ours.bases:
            answer = self._ask(method, f"{base}.{name}")
            if answer is None or "call" not in answer:
                continue
            static = "staticmethod" in map(ast.unparse, method.decorator_list)
            theirs = parameters(answer["call"], answer.get("bound") != "staticmethod")
            mine = parameters(signature(method.args), not static)
            if line := unlike(mine, theirs):
                self._fault(
                    method,
                    f"{ours.node.name}.{name}{text_of(mine)} stands for {base}.{name}{text_of(theirs)}: {line}.",
                )

    # Functions.

    def visit_FunctionDef(
        self, node: ast.FunctionDef, owner: OurClass | None = None
    ) -> None:
        for decorator in node.decorator_list:
            self.visit(decorator)
        scope: dict[str, Type | None] = {}
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        within = f"{owner.node.name}." if owner is not None else ""
        for argument in arguments:
            known = TYPES.get(f"{self._name}:{within}{node.name}.{argument.arg}")
            scope[argument.arg] = (
                Type("object", known) if known else self._annotated(argument.annotation)
            )
        static = "staticmethod" in map(ast.unparse, node.decorator_list)
        if owner is not None and arguments and not static:
            scope[arguments[0].arg] = Type("ours", owner.node.name)
        outer = self._narrowed
        self._narrowed = outer | _narrowed(node)
        self._scopes.append(scope)
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self._scopes.pop()
        self._narrowed = outer

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def _annotated(self, node: ast.AST | None) -> Type | None:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        if isinstance(node, ast.BinOp):
            return self._annotated(node.left) or self._annotated(node.right)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            if node.value.id in ("Sequence", "list", "Iterable"):
                found = self._annotated(node.slice)
                return found and Type("items", found.path)
            return None
        found = (
            self._infer(node) if isinstance(node, ast.Name | ast.Attribute) else None
        )
        return Type("object", found.path) if found and found.kind == "class" else None

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self._bind(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
        if isinstance(node.target, ast.Name):
            self._scopes[-1][node.target.id] = self._annotated(node.annotation)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, other in zip(target.elts, value.elts, strict=True):
                self._bind(one, other)
        elif isinstance(target, ast.Name):
            found = self._infer(value)
            sure = found is None or ast.unparse(value) not in self._narrowed
            self._scopes[-1][target.id] = found if sure else None
        elif isinstance(target, ast.Attribute):
            owner = self._infer(target.value)
            if owner is not None and owner.kind == "ours":
                found = self._infer(value)
                if found is not None:
                    self._classes[owner.path].types[target.attr] = found
            else:
                # A field of vLLM's that is set.
                self.visit(target)

    def visit_For(self, node: ast.For) -> None:
        self._bind_item(node.target, node.iter)
        self.generic_visit(node)

    def _visit_comprehension(self, node: Any) -> None:
        self._scopes.append({})
        for generator in node.generators:
            self._bind_item(generator.target, generator.iter)
        self.generic_visit(node)
        self._scopes.pop()

    visit_ListComp = visit_SetComp = visit_GeneratorExp = _visit_comprehension
    visit_DictComp = _visit_comprehension

    def _bind_item(self, target: ast.expr, items: ast.expr) -> None:
        found = self._infer(items)
        for name in ast.walk(target):
            if isinstance(name, ast.Name):
                self._scopes[-1][name.id] = None
        if isinstance(target, ast.Name) and found is not None and found.kind == "items":
            self._scopes[-1][target.id] = Type("object", found.path)

    # Expressions.

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.visit(node.value)
        owner = self._infer(node.value)
        if owner is None or ast.unparse(node.value) in self._narrowed:
            return
        if self._has(node, owner, node.attr) is False:
            name = owner.path if owner.kind != "ours" else f"{owner.path}'s bases"
            self._fault(node, f"vLLM has no {_joined(name, owner, node.attr)}.")

    def _has(self, node: ast.AST, owner: Type, name: str) -> bool | None:
        """None where that cannot be told."""
        if name.startswith("__") or name in OF_ENUMS:
            return None
        if owner.kind == "ours":
            ours = self._classes[owner.path]
            if name in ours.names or not ours.bases:
                return None
            found = any(self._ask(node, f"{base}.{name}") for base in ours.bases)
            return True if found else (None if ours.open else False)
        if owner.kind in ("class", "object"):
            if self._ask(node, f"{owner.path}.{name}"):
                return True
            answer = self._ask(node, owner.path)
            return None if answer and answer.get("open") else False
        if owner.kind == "module":
            return bool(self._ask(node, f"{owner.path}:{name}"))
        return None

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        call, name = self._called(node.func)
        if call is None or any(isinstance(a, ast.Starred) for a in node.args):
            return
        named = {str(k.arg): ... for k in node.keywords if k.arg is not None}
        complete = len(named) == len(node.keywords)
        called = inspect.Signature(call)
        bind = called.bind if complete else called.bind_partial
        try:
            bind(*node.args, **named)
        except TypeError as error:
            self._fault(node, f"{name}{text_of(call)} is called, and {error}.")

    def _called(self, node: ast.expr) -> tuple[list[inspect.Parameter] | None, str]:
        """The parameters of what is called, and its name."""
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Call)
            and isinstance(node.value.func, ast.Name)
            and node.value.func.id == "super"
        ):
            return self._called_above(node)
        if isinstance(node, ast.Attribute):
            owner = self._infer(node.value)
            if owner is None or owner.kind in ("items", "function"):
                return None, ""
            if owner.kind == "ours":
                ours = self._classes[owner.path]
                if node.attr in ours.names:
                    return None, ""
                return self._member_of(node, ours.bases, node.attr, bound=True)
            if owner.kind != "module":
                return self._member_of(
                    node, [owner.path], node.attr, bound=owner.kind == "object"
                )
        found = self._infer(node)
        if found is None or found.kind not in ("class", "function"):
            return None, ""
        construction = "()" if found.kind == "class" else ""
        answer = self._ask(node, f"{found.path}{construction}")
        if answer is None or "call" not in answer:
            return None, ""
        return parameters(answer["call"], False), found.path

    def _called_above(
        self, node: ast.Attribute
    ) -> tuple[list[inspect.Parameter] | None, str]:
        mine = [
            found
            for scope in reversed(self._scopes)
            for found in scope.values()
            if found and found.kind == "ours"
        ]
        if not mine:
            return None, ""
        me = mine[0]
        ours = self._classes[me.path]
        if node.attr == "__init__":
            for base in ours.bases:
                answer = self._ask(node, f"{base}()")
                if answer and "call" in answer:
                    return parameters(answer["call"], False), base
            return None, ""
        found = self._member_of(node, ours.bases, node.attr, bound=True)
        if found[0] is None and ours.bases and not ours.open:
            self._fault(node, f"vLLM has no {ours.bases[0]}.{node.attr}.")
        return found

    def _member_of(
        self, node: ast.AST, owners: list[str], name: str, *, bound: bool
    ) -> tuple[list[inspect.Parameter] | None, str]:
        for owner in owners:
            answer = self._ask(node, f"{owner}.{name}")
            if answer is not None and "call" in answer:
                how = answer.get("bound")
                first = how == "classmethod" or (bound and how != "staticmethod")
                return parameters(answer["call"], first), f"{owner}.{name}"
        return None, ""

    def _infer(self, node: ast.AST) -> Type | None:
        if isinstance(node, ast.Name):
            return self._lookup(node.id)
        if isinstance(node, ast.Attribute):
            owner = self._infer(node.value)
            if owner is None or owner.kind in ("items", "function"):
                return None
            if owner.kind == "ours":
                ours = self._classes[owner.path]
                if node.attr in ours.types:
                    return ours.types[node.attr]
                if node.attr in ours.names:
                    return None
                bases = ours.bases
            else:
                bases = [owner.path]
            for base in bases:
                path = _joined(base, owner, node.attr)
                if path in TYPES:
                    return Type("object", TYPES[path])
                answer = self._ask(node, path)
                if answer is not None:
                    return _type_of(answer, path)
            return None
        if isinstance(node, ast.Call):
            found = self._infer(node.func)
            if found is not None and found.kind == "class":
                return Type("object", found.path)
            if found is not None and found.kind == "function":
                answer = self._ask(node, found.path)
                returned = answer.get("type") if answer else None
                return _object(returned) if returned else None
        if isinstance(node, ast.BoolOp):
            return self._infer(node.values[0])
        if isinstance(node, ast.IfExp):
            return self._infer(node.body) or self._infer(node.orelse)
        if isinstance(node, ast.Subscript):
            found = self._infer(node.value)
            if found is not None and found.kind == "items":
                return Type("object", found.path)
        return None


@cache
def _narrowed(node: ast.FunctionDef) -> frozenset[str]:
    """What a function calls `isinstance` on, and what it sets."""
    found = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
            found.add(ast.unparse(part))
        elif isinstance(part, ast.Call) and ast.unparse(part.func) == "isinstance":
            found.add(ast.unparse(part.args[0]))
    return frozenset(found)


def readings(text: str) -> Iterator[str]:
    """The questions that a dotted text may stand for: a module, a name in one, a member of a class."""
    if ":" in text:
        yield text
        return
    yield f"{text}:"
    parts = text.split(".")
    for split in (1, 2):
        if len(parts) > split:
            yield f"{'.'.join(parts[:-split])}:{'.'.join(parts[-split:])}"


def _object(path: str) -> Type:
    return Type("items", path[2:]) if path.startswith("[]") else Type("object", path)


def _type_of(answer: dict[str, Any] | None, path: str) -> Type | None:
    if answer is None:
        return None
    if answer["is"] == "value":
        return _object(answer["type"]) if "type" in answer else None
    if answer["is"] in ("class", "module"):
        return Type(answer["is"], answer.get("at", path))
    return Type("function", path) if answer["is"] == "function" else None


def _joined(path: str, owner: Type, name: str) -> str:
    return f"{path}:{name}" if owner.kind == "module" else f"{path}.{name}"


def _defined(node: ast.AST) -> list[str]:
    """Names that a statement within a class gives the class or its objects."""
    if isinstance(node, ast.FunctionDef):
        return [node.name]
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return [node.attr] if ast.unparse(node.value) in ("self", "cls") else []
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    return []
