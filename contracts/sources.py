"""Facts about a vLLM, read off its sources by `ast`; nothing of it is imported.

A question is a text, and its answer JSON, or None where there is no such thing:

    package.module:               the module                         {"is": "module"}
    package.module:Name           a class, function or value         {"is": …, "at": where it is defined, …}
    package.module:Class()        how an object of it is made        {"call": …}
    package.module:Class.name     a member, inherited ones too       likewise
    package.module:Name#source    a digest of the source, as patches/registry.py makes it
    package.module?expression     what the module asks of the object that it calls `expression`

"call" is the signature of a function, or of a class, with `...` for any default; "type" is the class of a value, or of what a
function returns, as far as annotations tell and it is vLLM's; "[]type" is a container of it.
"""

import ast
import hashlib
import textwrap
import zipfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from contracts.signatures import shape_of, signature

Answer = dict[str, Any] | str | None
Scope = dict[str, list[tuple[ast.stmt, str]]]
# Bases of other origin that bring no names of their own.
CLOSED = ("ABC", "object", "Generic", "Protocol", "Enum", "IntEnum", "StrEnum")
DATACLASSES = ("dataclass", "config", "dataclass_transform")


class Sources:
    """A wheel, or a folder with the folder `vllm` in it."""

    def __init__(self, where: Path) -> None:
        """Raises FileNotFoundError if there is no vLLM."""
        self._where = where
        self._archive = zipfile.ZipFile(where) if where.is_file() else None
        self.tree = cache(self.tree)  # type: ignore[method-assign]
        self.scope = cache(self.scope)  # type: ignore[method-assign]
        self.ask = cache(self.ask)  # type: ignore[method-assign]
        if self.tree("vllm") is None:
            raise FileNotFoundError(
                f"{where} holds no vLLM. Give a wheel, or a folder that holds the folder vllm."
            )

    def ask(self, question: str) -> Answer:
        if "?" in question:
            module, _, expression = question.partition("?")
            return self._asked_of(module, expression)
        question, made = question.removesuffix("()"), question.endswith("()")
        question, _, source = question.partition("#")
        module, _, path = question.partition(":")
        if self.tree(module) is None:
            return None
        if not path:
            return {"is": "module"}
        first, *members = path.split(".")
        found = self._find(module, first)
        for name in members:
            owner = self._class_of(*found) if found is not None else None
            found = self._member(*owner, name) if owner is not None else None
        if found is None:
            return None
        if made:
            return self._construction(*found)
        return self._digest(*found) if source else self._describe(*found)

    def tree(self, module: str) -> ast.Module | None:
        """The module, parsed."""
        path = module.replace(".", "/")
        for name in (f"{path}.py", f"{path}/__init__.py"):
            text = self._read(name)
            if text is not None:
                return ast.parse(text)
        return None

    def _read(self, name: str) -> str | None:
        if self._archive:
            try:
                return self._archive.read(name).decode()
            except KeyError:
                return None
        file = self._where / name
        return file.read_text(encoding="utf-8") if file.is_file() else None

    def scope(self, module: str) -> Scope:
        """What a module binds at its top, under conditions too."""
        scope: Scope = {}
        tree = self.tree(module)
        for statement in _flat(tree.body if tree else []):
            for name in _bound(statement):
                scope.setdefault(name, []).append((statement, module))
        return scope

    def _find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """Where a name is defined, through imports: module and node."""
        candidates = self.scope(module).get(name, [])
        # Under TYPE_CHECKING, or after a failed import, a name has a second meaning.
        for kind in ((ast.ClassDef, ast.FunctionDef), ast.ImportFrom, ast.stmt):
            for statement, _ in candidates:
                if not isinstance(statement, kind):
                    continue
                if isinstance(statement, ast.ImportFrom):
                    origin = self._origin(module, statement)
                    (alias,) = [
                        a for a in statement.names if (a.asname or a.name) == name
                    ]
                    if origin.split(".")[0] != "vllm":
                        continue
                    found = self._find(origin, alias.name)
                    if found is not None:
                        return found
                    continue
                return module, statement
        tree = self.tree(f"{module}.{name}")
        return (f"{module}.{name}", tree) if tree is not None else None

    def _origin(self, module: str, statement: ast.ImportFrom) -> str:
        if not statement.level:
            return statement.module or ""
        # Within a package's __init__, one dot is the package itself.
        parts = module.split(".")
        up = statement.level - self._is_package(module)
        parts = parts[: len(parts) - up]
        return ".".join([*parts, *filter(None, [statement.module])])

    def _is_package(self, module: str) -> bool:
        return self._read(f"{module.replace('.', '/')}/__init__.py") is not None

    def _lineage(self, module: str, node: ast.ClassDef) -> Iterator[tuple[str, Any]]:
        """A class and what it inherits from, nearest first; None for what is not vLLM's."""
        yield module, node
        for base in node.bases:
            if isinstance(base, ast.Subscript):
                base = base.value
            found = self._resolve(module, base)
            if found is not None and isinstance(found[1], ast.ClassDef):
                yield from self._lineage(found[0], found[1])
            elif ast.unparse(base).split(".")[-1] not in CLOSED:
                yield ast.unparse(base), None

    def _resolve(self, module: str, node: ast.AST) -> tuple[str, ast.AST] | None:
        if isinstance(node, ast.Name):
            return self._find(module, node.id)
        if isinstance(node, ast.Attribute):
            owner = self._resolve(module, node.value)
            if owner is not None and isinstance(owner[1], ast.Module):
                return self._find(owner[0], node.attr)
        return None

    def _class_of(self, module: str, node: ast.AST) -> tuple[str, ast.ClassDef] | None:
        """A class, or the class of a value."""
        if isinstance(node, ast.ClassDef):
            return module, node
        path = self._type_of_value(module, node) or ""
        home, _, name = path.partition(":")
        found = self._find(home, name) if name else None
        if found is None or not isinstance(found[1], ast.ClassDef):
            return None
        return found[0], found[1]

    def _member(
        self, module: str, node: ast.ClassDef, name: str
    ) -> tuple[str, ast.AST] | None:
        for home, owner in self._lineage(module, node):
            if owner is None:
                continue
            for statement in _flat(owner.body):
                if name in _bound(statement):
                    return home, statement
            for method in owner.body:
                if isinstance(method, ast.FunctionDef):
                    for part in ast.walk(method):
                        if name in _bound_on_self(part):
                            return home, _Held(part, method)
        return None

    def _describe(self, module: str, node: ast.AST) -> Answer:
        if isinstance(node, ast.Module):
            return {"is": "module", "at": module}
        if isinstance(node, ast.ClassDef):
            return self._describe_class(module, node)
        if isinstance(node, ast.FunctionDef):
            names = [_last(decorator) for decorator in node.decorator_list]
            type_ = self._type(module, node.returns)
            if {"property", "cached_property", "classproperty"} & {*names}:
                return _filled({"is": "value", "type": type_})
            bound = {"staticmethod", "classmethod"} & {*names}
            answer = {"is": "function", "call": signature(node.args), "type": type_}
            return _filled(answer | {"bound": bound.pop() if bound else None})
        return _filled({"is": "value", "type": self._type_of_value(module, node)})

    def _describe_class(self, module: str, node: ast.ClassDef) -> Answer:
        lineage = list(self._lineage(module, node))
        opened = any(owner is None for _, owner in lineage) or bool(
            self._member(module, node, "__getattr__")
        )
        answer = {"is": "class", "at": f"{module}:{node.name}"}
        return _filled(answer | {"open": opened or None})

    def _construction(self, module: str, node: ast.AST) -> Answer:
        if not isinstance(node, ast.ClassDef):
            return None
        lineage = [pair for pair in self._lineage(module, node) if pair[1] is not None]
        positional: dict[str, str] = {}
        keyword: dict[str, str] = {}
        for index, (_, owner) in enumerate(lineage):
            for statement in owner.body:
                if (
                    isinstance(statement, ast.FunctionDef)
                    and statement.name == "__init__"
                ):
                    return {"call": signature(statement.args, bound=True)}
            if _dataclass_of(owner) is not None:
                lineage = lineage[index:]
                break
        else:
            return None
        for _, owner in reversed(lineage):
            decorator = _dataclass_of(owner)
            if decorator is None:
                continue
            only = "kw_only=True" in ast.unparse(decorator)
            for statement in owner.body:
                if not isinstance(statement, ast.AnnAssign) or not isinstance(
                    statement.target, ast.Name
                ):
                    continue
                value = ast.unparse(statement.value) if statement.value else ""
                if (
                    "ClassVar" in ast.unparse(statement.annotation)
                    or "init=False" in value
                ):
                    continue
                name = statement.target.id
                default = value and not (
                    value.startswith("field(") and "default" not in value
                )
                where = keyword if only or "kw_only=True" in value else positional
                where[name] = f"{name}=..." if default else name
        middle = ["*"] if keyword else []
        names = ", ".join([*positional.values(), *middle, *keyword.values()])
        return {"call": f"({names})"}

    def _type_of_value(self, module: str, node: ast.AST) -> str | None:
        method: ast.FunctionDef | None = None
        if isinstance(node, _Held):
            method, node = node.method, node.statement
        if isinstance(node, ast.AnnAssign):
            return self._type(module, node.annotation)
        value = getattr(node, "value", None)
        if isinstance(value, ast.Call):
            found = self._resolve(module, value.func)
            if found is not None and isinstance(found[1], ast.ClassDef):
                return f"{found[0]}:{found[1].name}"
        if isinstance(value, ast.Name) and method is not None:
            for argument in (*method.args.args, *method.args.kwonlyargs):
                if argument.arg == value.id:
                    return self._type(module, argument.annotation)
        return None

    def _type(self, module: str, node: ast.AST | None) -> str | None:
        """The first class of vLLM's in an annotation."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        if isinstance(node, ast.BinOp):
            return self._type(module, node.left) or self._type(module, node.right)
        if isinstance(node, ast.Subscript):
            name = _last(node.value)
            if name in ("Optional", "ClassVar", "Annotated", "Final", "SkipValidation"):
                inner = node.slice
                return self._type(
                    module, inner.elts[0] if isinstance(inner, ast.Tuple) else inner
                )
            if name in ("list", "List", "Sequence", "Iterable", "tuple"):
                inner = node.slice
                item = self._type(
                    module, inner.elts[0] if isinstance(inner, ast.Tuple) else inner
                )
                return f"[]{item}" if item else None
            node = node.value
        found = self._resolve(module, node) if node is not None else None
        if found is not None and isinstance(found[1], ast.ClassDef):
            return f"{found[0]}:{found[1].name}"
        return None

    def _digest(self, module: str, node: ast.AST) -> str:
        text = self._read(f"{module.replace('.', '/')}.py") or self._read(
            f"{module.replace('.', '/')}/__init__.py"
        )
        assert text is not None
        assert isinstance(node, ast.FunctionDef | ast.ClassDef)
        first = min(n.lineno for n in (node, *node.decorator_list))
        lines = text.splitlines(keepends=True)[first - 1 : node.end_lineno]
        source = textwrap.dedent("".join(lines))
        return hashlib.sha256(source.encode()).hexdigest()[:16]

    def _asked_of(self, module: str, expression: str) -> Answer:
        """Attributes by name: the shapes of calls, and whether each use is guarded by a look whether it is there."""
        tree = self.tree(module)
        if tree is None:
            return None
        asked: dict[str, Any] = {}
        guarded: set[str] = set()
        calls: dict[int, ast.Call] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                calls[id(node.func)] = node
                if _last(node.func) in ("hasattr", "getattr") and len(node.args) > 1:
                    of, name = node.args[:2]
                    if ast.unparse(of) == expression and isinstance(name, ast.Constant):
                        guarded.add(str(name.value))
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Load)
                and ast.unparse(node.value) == expression
            ):
                shapes = asked.setdefault(node.attr, [])
                call = calls.get(id(node))
                if call is not None and (shape := shape_of(call)) not in shapes:
                    shapes.append(shape)
        return {"asked": asked, "guarded": sorted(guarded)} if asked else None


class _Held(ast.AST):
    """`self.name = …` in a method."""

    def __init__(self, statement: ast.AST, method: ast.FunctionDef) -> None:
        self.statement, self.method = statement, method


def _filled(answer: dict[str, Any]) -> Answer:
    return {name: value for name, value in answer.items() if value is not None}


def _last(node: ast.AST) -> str:
    """The last name of `a.b.c` or of a call of it."""
    if isinstance(node, ast.Call):
        node = node.func
    return getattr(node, "attr", getattr(node, "id", ""))


def _dataclass_of(node: ast.ClassDef) -> ast.AST | None:
    return next((d for d in node.decorator_list if _last(d) in DATACLASSES), None)


def _flat(statements: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, and those under `if` and `try`."""
    for statement in statements:
        if isinstance(statement, ast.If | ast.Try):
            yield from _flat(statement.body)
            yield from _flat(statement.orelse)
            for handler in getattr(statement, "handlers", []):
                yield from _flat(handler.body)
        else:
            yield statement


def _bound(statement: ast.AST) -> list[str]:
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [statement.name]
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [(a.asname or a.name).split(".")[0] for a in statement.names]
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _bound_on_self(statement: ast.AST) -> list[str]:
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            targets += target.elts if isinstance(target, ast.Tuple) else [target]
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return [
        target.attr
        for target in targets
        if isinstance(target, ast.Attribute)
        and isinstance(target.value, ast.Name)
        and target.value.id in ("self", "cls")
    ]
