"""Signatures as texts, `(self, a, b=..., *, c)`, and whether one can be called as another is."""

import ast
import inspect


def signature(arguments: ast.arguments, bound: bool = False) -> str:
    """Names in order, `...` for every default; `bound`: without the first."""
    bare = ast.arguments(
        posonlyargs=[ast.arg(a.arg) for a in arguments.posonlyargs],
        args=[ast.arg(a.arg) for a in arguments.args],
        vararg=ast.arg(arguments.vararg.arg) if arguments.vararg else None,
        kwonlyargs=[ast.arg(a.arg) for a in arguments.kwonlyargs],
        kw_defaults=[d and ast.Constant(...) for d in arguments.kw_defaults],
        kwarg=ast.arg(arguments.kwarg.arg) if arguments.kwarg else None,
        defaults=[ast.Constant(...) for _ in arguments.defaults],
    )
    if bound:
        del (bare.posonlyargs or bare.args)[0]
    return f"({ast.unparse(bare)})"


def shape_of(call: ast.Call) -> str:
    """How a call passes its arguments: "2, name, other", or "*" where it cannot be told."""
    if any(isinstance(a, ast.Starred) for a in call.args) or any(
        keyword.arg is None for keyword in call.keywords
    ):
        return "*"
    names = sorted(str(keyword.arg) for keyword in call.keywords)
    return ", ".join([str(len(call.args)), *names])


def parameters(text: str, bound: bool) -> list[inspect.Parameter]:
    """From `(self, a, b=..., *, c)`; `bound`: without the first."""
    (function,) = ast.parse(f"def f{text}: ...").body
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    kinds = inspect.Parameter
    found = [kinds(a.arg, kinds.POSITIONAL_ONLY) for a in arguments.posonlyargs]
    found += [kinds(a.arg, kinds.POSITIONAL_OR_KEYWORD) for a in arguments.args]
    count = len(arguments.defaults)
    if count:
        found[-count:] = [p.replace(default=...) for p in found[-count:]]
    if arguments.vararg:
        found.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    for argument, default in zip(
        arguments.kwonlyargs, arguments.kw_defaults, strict=True
    ):
        required = kinds.empty if default is None else ...
        found.append(kinds(argument.arg, kinds.KEYWORD_ONLY, default=required))
    if arguments.kwarg:
        found.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return found[1:] if bound else found


def text_of(parameters: list[inspect.Parameter]) -> str:
    return str(inspect.Signature(parameters)).replace("Ellipsis", "...")


def unlike(mine: list[inspect.Parameter], theirs: list[inspect.Parameter]) -> str:
    """Why `mine` cannot be called as `theirs` is; empty where it can."""
    kinds = {p.kind for p in mine}
    anything = inspect.Parameter.VAR_POSITIONAL in kinds
    any_name = inspect.Parameter.VAR_KEYWORD in kinds
    places = [p.name for p in mine]
    for place, parameter in enumerate(theirs):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.name not in places:
            by_name = parameter.kind is parameter.KEYWORD_ONLY
            if any_name if by_name else anything:
                continue
            return f"{parameter.name} is missing"
        moved = places.index(parameter.name) != place
        if moved and parameter.kind is not parameter.KEYWORD_ONLY and not anything:
            return f"{parameter.name} is at another place"
        own = mine[places.index(parameter.name)]
        if parameter.default is not parameter.empty and own.default is own.empty:
            return f"{parameter.name} has lost its default"
    known = {p.name for p in theirs}
    for parameter in mine:
        required = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
        if required and parameter.name not in known:
            return f"{parameter.name} is not given"
    return ""
