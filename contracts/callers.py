"""What vLLM calls on our classes where no base class spells the contract out: a line for each thing that they lack."""

import ast
import inspect
from pathlib import Path

from contracts.signatures import parameters, signature, text_of
from contracts.table import BASES, CALLERS, NOT_ASKED_OF_US, OF_TORCH
from contracts.uses import Ask, Unrecorded


def faults_of_callers(files: dict[str, Path], ask: Ask) -> list[str]:
    """Args: as of `uses.faults_of_uses`."""
    faults = []
    for question, path in CALLERS:
        module, _, name = path.partition(":")
        node = _class(files[module], name)
        try:
            answer = ask(question)
        except Unrecorded:
            faults.append(f"{question} is new here: record the answers again.")
            continue
        if not isinstance(answer, dict):
            faults.append(
                f"{path}: {question} asks for nothing any more: who calls it now?"
            )
            continue
        for asked, shapes in answer["asked"].items():
            if asked in answer["guarded"] or asked in OF_TORCH:
                continue
            if (path, asked) in NOT_ASKED_OF_US:
                continue
            faults += _faults_of_one(path, node, asked, shapes, question, ask)
    return faults


def _faults_of_one(
    path: str, node: ast.ClassDef, asked: str, shapes: list[str], caller: str, ask: Ask
) -> list[str]:
    found = _own(node, asked)
    if found is None:
        # Inherited: vLLM's own class answers for it.
        if path in BASES and ask(f"{BASES[path]}.{asked}"):
            return []
        return [f"{path} has no {asked}, which {caller} asks for."]
    if not isinstance(found, ast.FunctionDef):
        return []
    if "property" in map(ast.unparse, found.decorator_list):
        return []
    mine = parameters(signature(found.args), True)
    faults = []
    for shape in shapes:
        if shape == "*" or (path, f"{asked}({shape})") in NOT_ASKED_OF_US:
            continue
        count, *names = shape.split(", ")
        try:
            inspect.Signature(mine).bind(*range(int(count)), **dict.fromkeys(names))
        except TypeError as error:
            faults.append(
                f"{path}.{asked}{text_of(mine)} is called by {caller} with {shape}, and {error}."
            )
    return faults


def _class(path: Path, name: str) -> ast.ClassDef:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (found,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name]
    return found


def _own(node: ast.ClassDef, name: str) -> ast.AST | None:
    """A method, or where a class or its objects get a value of that name."""
    for statement in ast.walk(node):
        if isinstance(statement, ast.FunctionDef) and statement.name == name:
            return statement
        if isinstance(statement, ast.Attribute | ast.Name):
            own = getattr(statement, "attr", getattr(statement, "id", ""))
            if own == name and isinstance(statement.ctx, ast.Store):
                return statement
    return None
