"""Which implementation of an op runs on which device.

An op is a stem: `ops/torch/<stem>.py` defines a function of that name, which is the reference. Other providers offer some of
the same names with the same signature. A module of the model asks once, when it is built:

    self.hc_pre = resolve("hc_pre", device)

The first provider of the preference list that has the op and accepts the device is taken; torch ends every list.
"""

import importlib.util
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from atom_vllm_bridge.models.ops import torch as torch_ops


class Op(Protocol):
    """A function of tensors; its signature is that of its stem in ops/torch."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


def _nothing(op: str, device: torch.device, named: bool) -> None:
    """What a provider lacks that takes all that it has wherever it runs."""


@dataclass(frozen=True)
class Provider:
    """A source of ops.

    Attributes:
        name: as written in the setting.
        load: stem → function, or None where the provider does not have it.
        refusal: why it cannot run on a device, or None where it can.
        lacks: why it does not run one of its ops on a device that it accepts, or None where it does; told whether a setting
            names the provider for that op.
    """

    name: str
    load: Callable[[str], Op | None]
    refusal: Callable[[torch.device], str | None]
    lacks: Callable[[str, torch.device, bool], str | None] = _nothing


@dataclass(frozen=True)
class Choice:
    """What `resolve` picked for an op on a device type, and why."""

    op: str
    device: str
    provider: str
    reason: str


def names() -> tuple[str, ...]:
    """Every op, in alphabetical order."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(torch_ops.__path__)))


def _load_torch(stem: str) -> Op:
    return getattr(importlib.import_module(f"{torch_ops.__name__}.{stem}"), stem)


def _load_from(folder: str, stem: str) -> Op | None:
    name = f"{__package__}.{folder}.{stem}"
    if importlib.util.find_spec(name) is None:
        return None
    return getattr(importlib.import_module(name), stem)


def _numba_refusal(device: torch.device) -> str | None:
    if device.type != "cpu":
        return "is for CPUs"
    return None if importlib.util.find_spec("numba") else "is not installed"


def _triton_refusal(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "is for GPUs"
    return None if importlib.util.find_spec("triton") else "is not installed"


def _aiter_refusal(device: torch.device) -> str | None:
    if device.type != "cuda" or torch.version.hip is None:
        return "is for AMD's GPUs"
    return importlib.import_module(f"{__package__}.aiter.installed").refusal(device)


def _aiter_lacks(op: str, device: torch.device, named: bool) -> str | None:
    needs = importlib.import_module(f"{__package__}.aiter.{op}").NEEDS
    return needs.missing(op, device, named)


_providers: dict[str, Provider] = {
    "torch": Provider("torch", _load_torch, lambda device: None),
    "numba": Provider("numba", partial(_load_from, "numba"), _numba_refusal),
    "triton": Provider("triton", partial(_load_from, "triton"), _triton_refusal),
    "aiter": Provider(
        "aiter", partial(_load_from, "aiter"), _aiter_refusal, _aiter_lacks
    ),
}
_preferred: tuple[str, ...] = ()
_pinned: dict[str, str] = {}
_choices: dict[tuple[str, str], Choice] = {}
_resolved: dict[tuple[str, str], Op] = {}


def register(provider: Provider, *, first: bool = True) -> None:
    """Offer a provider; one of the same name is replaced.

    Of those registered, later ones come first; one that is not to be `first` comes after all others but torch, where no
    setting prefers it.
    """
    _providers.pop(provider.name, None)
    others = {} if first else {n: _providers.pop(n) for n in [*_providers][1:]}
    _providers[provider.name] = provider
    _providers.update(others)
    _resolved.clear()


def providers() -> tuple[str, ...]:
    """Every provider that there is, for whatever device."""
    return tuple(_providers)


def has(provider: str, op: str) -> bool:
    """Whether `provider` has `op`, on the devices that it is for."""
    return _providers[provider].load(op) is not None


def first(op: str, device: torch.device | str) -> str:
    """The provider that runs `op` on `device` where no setting prefers another."""
    having = providers_of(op, device)
    return next(name for name in reversed(_providers) if name in having)


def refusal_of(
    provider: str, device: torch.device | str, op: str | None = None
) -> str | None:
    """Why a provider cannot run on `device`, or one of its ops there; None where it can."""
    found, device = _providers[provider], torch.device(device)
    refusal = found.refusal(device)
    return refusal or (found.lacks(op, device, True) if op else None)


def providers_of(op: str, device: torch.device | str = "cpu") -> tuple[str, ...]:
    """The providers that have `op` and run on `device`; for tests that compare them."""
    device = torch.device(device)
    return tuple(
        name
        for name, provider in _providers.items()
        if provider.refusal(device) is None
        and provider.load(op) is not None
        and provider.lacks(op, device, True) is None
    )


def resolve_from(provider: str, op: str) -> Op:
    """`op` as one provider has it, whatever is preferred.

    Raises:
        ValueError: the provider does not have it.
    """
    function = _providers[provider].load(op)
    if function is None:
        raise ValueError(f"ops: {provider} has no {op}.")
    return function


def configure(spec: str) -> None:
    """Set the preference from text such as `"triton,indexer_topk=torch"`.

    A bare name is a preferred provider (several: in this order); `op=provider` pins one op. An empty text restores the defaults.

    Raises:
        ValueError: an unknown op or provider.
    """
    global _preferred, _pinned
    preferred: list[str] = []
    pinned: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in spec.split(","))):
        op, _, provider = part.rpartition("=")
        if provider not in _providers:
            raise ValueError(
                f"ops: no provider is called {provider!r} in {spec!r}; there are {', '.join(_providers)}."
            )
        if not op:
            preferred.append(provider)
        elif op in names():
            pinned[op] = provider
        else:
            raise ValueError(
                f"ops: no op is called {op!r} in {spec!r}; there are {', '.join(names())}."
            )
    _preferred, _pinned = tuple(preferred), pinned
    _choices.clear()
    _resolved.clear()


def resolve(op: str, device: torch.device | str) -> Op:
    """The function that runs `op` on `device`.

    Raises:
        ValueError: the setting pins the op to a provider that lacks it or refuses the device.
    """
    device = torch.device(device)
    if pin := _pinned.get(op):
        provider = _providers[pin]
        reason = provider.refusal(device)
        function = None if reason else provider.load(op)
        if function is not None and (reason := provider.lacks(op, device, True)):
            function = None
        if function is None:
            raise ValueError(
                f"ops: {op}={pin} is set, but {reason or f'{pin} has no {op}'}; take it out of the setting."
            )
        _choices[op, device.type] = Choice(
            op, device.type, pin, "pinned by the setting"
        )
        return function
    others = [name for name in reversed(_providers) if name not in _preferred]
    passed: list[str] = []
    for name in (*_preferred, *others):
        provider = _providers[name]
        if reason := provider.refusal(device):
            passed.append(f"{name}: {reason}")
        elif (function := provider.load(op)) is None:
            passed.append(f"{name} has no {op}")
        elif reason := provider.lacks(op, device, name in _preferred):
            passed.append(f"{name}: {reason}")
        else:
            why = "; ".join(passed) or "first in the list"
            _choices[op, device.type] = Choice(op, device.type, name, why)
            return function
    raise ValueError(f"ops: no provider has {op!r}; there are {', '.join(names())}.")


def resolved(op: str, device: torch.device) -> Op:
    """`resolve`, remembered until a setting or a provider changes: for what no module asks for when it is built, but every step."""
    key = op, device.type
    if key not in _resolved:
        _resolved[key] = resolve(op, device)
    return _resolved[key]


def table() -> list[Choice]:
    """The choices made so far, by op."""
    return [_choices[key] for key in sorted(_choices)]
