"""aiter's functions as they are installed: found by name, and called by the names of their arguments.

aiter renames functions and arguments from one week to the next. An entry says under which names it is known, what a call gives,
and which constants mean the same under several names; whether the installed function fits is read from its signature. A function
that wants something which nobody here gives is refused as well.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from atom_vllm_bridge.models.ops.aiter.installed import FP8, architecture


@dataclass(frozen=True)
class Bound:
    """An installed function.

    Attributes:
        function: as imported.
        order: its positional parameters: the name by which a call gives it, or None, and the value where it does not.
        keywords: the same, of parameters that only have names, by name.
    """

    function: Callable[..., Any]
    order: tuple[tuple[str | None, Any], ...]
    keywords: Mapping[str, tuple[str | None, Any]]

    def __call__(self, **given: Any) -> Any:
        def value(name: str | None, default: Any) -> Any:
            return default if name is None else given.get(name, default)

        return self.function(
            *(value(*parameter) for parameter in self.order),
            **{name: value(*known) for name, known in self.keywords.items()},
        )


@dataclass(frozen=True)
class Entry:
    """A function of aiter.

    Attributes:
        places: "module:function", newest first.
        takes: what every call gives, by name.
        may_take: what calls give where the function has it, by name.
        renamed: other names of what is given.
        one_of: constants of which the function must have one: the first that it has is given.
        constants: given where the function has them.
    """

    places: tuple[str, ...]
    takes: tuple[str, ...]
    may_take: tuple[str, ...] = ()
    renamed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    one_of: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.places[0].split(":")[1]

    def missing(self) -> str | None:
        """Why it cannot be called, or None."""
        found = self._find()
        return found if isinstance(found, str) else None

    def has(self, *names: str) -> bool:
        """Whether the installed function takes all of these."""
        found = self._find()
        if isinstance(found, str):
            return False
        known = {name for name, _ in (*found.order, *found.keywords.values())}
        return known.issuperset(names)

    def __call__(self, **given: Any) -> Any:
        found = self._find()
        if isinstance(found, str):
            raise RuntimeError(f"ops: aiter {found}")
        return found(**given)

    def _find(self) -> Bound | str:
        if self.places not in _found:
            _found[self.places] = self._bind()
        return _found[self.places]

    def _bind(self) -> Bound | str:
        function: Callable[..., Any] | None = None
        for place in self.places:
            module, _, name = place.partition(":")
            try:
                function = getattr(importlib.import_module(module), name, None)
            except ModuleNotFoundError as error:
                if error.name is None or not module.startswith(error.name):
                    return f"cannot be imported: {error}"
            # Its import compiles and loads libraries, which fails in many ways.
            except (ImportError, OSError, RuntimeError, AttributeError) as error:
                return f"cannot be imported: {str(error).splitlines()[0]}"
            if function is not None:
                break
        if function is None:
            return f"has no {' or '.join(p.split(':')[1] for p in self.places)}"
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            return f"has a {name} whose arguments cannot be read"
        return self._order(function, name, list(parameters))

    def _order(
        self, function: Callable[..., Any], name: str, parameters: list
    ) -> Bound | str:
        spelled = {n: n for n in (*self.takes, *self.may_take)}
        for ours, theirs in self.renamed.items():
            spelled |= dict.fromkeys(theirs, ours)
        if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
            return f"has a {name} whose arguments cannot be read"
        there = [p.name for p in parameters]
        chosen = next((n for n in self.one_of if n in there), None)
        if self.one_of and chosen is None:
            return f"has a {name} without {' or '.join(self.one_of)}"
        order: list[tuple[str | None, Any]] = []
        keywords: dict[str, tuple[str | None, Any]] = {}
        for p in parameters:
            default = p.default
            if p.name == chosen:
                default = self.one_of[p.name]
            elif p.name in self.constants:
                default = self.constants[p.name]
            known = spelled.get(p.name)
            if known is None and default is p.empty:
                return f"has a {name} that also wants {p.name}"
            if p.kind is p.KEYWORD_ONLY:
                keywords[p.name] = (known, default)
            else:
                order.append((known, default))
        given = {n for n, _ in (*order, *keywords.values())}
        if lost := [n for n in self.takes if n not in given]:
            return f"has a {name} without {', '.join(lost)}"
        return Bound(function, tuple(order), keywords)


# Looked for once a process.
_found: dict[tuple[str, ...], Bound | str] = {}


@dataclass(frozen=True)
class Needs:
    """What an adapter needs of aiter and of a GPU.

    Attributes:
        entries: the functions that it calls.
        architectures: where they exist.
        elsewhere: why not on another one.
        rounds: what it rounds that other providers of the op do not; then it is taken where a setting names it only.
    """

    entries: tuple[Entry, ...]
    architectures: tuple[str, ...] = tuple(FP8)
    elsewhere: str = ""
    rounds: str | None = None

    def missing(self, op: str, device: torch.device, named: bool) -> str | None:
        """Why the op is not taken on a device that the provider accepts, or None."""
        name = architecture(device)
        if name not in self.architectures:
            return f"not on {name}: {self.elsewhere}"
        for entry in self.entries:
            if reason := entry.missing():
                return reason
        if self.rounds is not None and not named:
            return f"{self.rounds}; ATOM_BRIDGE_OPS={op}=aiter takes it"
        return None
