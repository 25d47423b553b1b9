"""What a user can set, in one place.

Two sources, read nowhere else: the "atom" object of vLLM's `--additional-config`, and the `ATOM_BRIDGE_*` environment
variables. A setting that both give is taken from `--additional-config`. Standard library only, so that it can be read
before vLLM has chosen its platform; `python -m atom_vllm_bridge.settings` prints the page `docs/settings.md`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

SECTION = "atom"
PREFIX = "ATOM_BRIDGE_"
STATE_LAYOUTS = ("paged", "ring")
ROLLBACKS = ("exact", "atom", "window")
NATIVE, ATOM = "native", "atom"
MODEL = "ATOM_BRIDGE_MODEL"

_NUMBER = ", or a number"
_SWITCH = {"1": True, "true": True, "0": False, "false": False, "": False}


def _setting(
    default: Any,
    about: str,
    *,
    variable: str | None = None,
    in_config: bool = False,
    choices: tuple[str, ...] = (),
    or_number: bool = False,
) -> Any:
    """A field of `Settings` with where it can be set, the values that exist, and its line of documentation.

    A text with `or_number` may also be a whole number, written as one or as text.
    """
    return field(
        default=default,
        metadata={
            "variable": variable,
            "in_config": in_config,
            "choices": choices,
            "or_number": or_number,
            "about": about,
        },
    )


@dataclass(frozen=True)
class Settings:
    disable: bool = _setting(
        False,
        "Leave vLLM as if the plugin were not installed.",
        variable="ATOM_BRIDGE_DISABLE",
    )
    allow_untested: bool = _setting(
        False,
        "Let a vLLM outside the supported range through.",
        variable="ATOM_BRIDGE_ALLOW_UNTESTED",
    )
    disable_patch: str = _setting(
        "",
        "Patches to leave out, by their ids in [patches.md](patches.md), separated by commas; one that DeepSeek-V4 needs "
        "on the device in use stops the start with one line.",
        variable="ATOM_BRIDGE_DISABLE_PATCH",
    )
    model: str = _setting(
        NATIVE,
        "Which model serves DeepSeek-V4. `native`: this project's. `atom`: that of an installed ROCm/ATOM, on AMD GPUs "
        "([amd.md](amd.md#atoms-own-deepseek-v4)); the other keys are the native model's. In Python, for `LLM` and "
        "`AsyncLLM`, set the variable.",
        variable=MODEL,
        in_config=True,
        choices=(NATIVE, ATOM),
    )
    ops: str = _setting(
        "",
        "Providers to prefer for the model's ops: a provider for all of them, `op=provider` for one, separated by "
        "commas, as in `numba,rope=torch`. Empty: the first that supports the device, dtype and shape.",
        variable="ATOM_BRIDGE_OPS",
        in_config=True,
    )
    state_layout: str = _setting(
        "paged",
        "How attention state lies in the KV cache. `paged`: every kind of state in block-keyed groups of its own; "
        "prefix hits land on 128 tokens. `ring`: the state that rolls, sliding windows and CSA compressors, in one ring a "
        "request, and a prefix hit is rolled back to fill it.",
        in_config=True,
        choices=STATE_LAYOUTS,
    )
    prefix_rollback: str = _setting(
        "exact",
        "With `ring`, how many tokens of a prefix hit are computed again. `exact`: so many that the answer is that of a "
        "cold run, layers × (window − 1) and with a draft one window more. `atom`: as ROCm/ATOM does, max(window + K, "
        "`index_topk`). `window`: the sliding window. Or a number of tokens, at least the window. All in multiples of 128; "
        "a hit that is no longer than this is not used.",
        in_config=True,
        choices=ROLLBACKS,
        or_number=True,
    )

    @classmethod
    def read(
        cls, additional_config: Mapping[str, Any] | None, environ: Mapping[str, str]
    ) -> Settings:
        """Settings from the two sources.

        Args:
            additional_config: vLLM's `VllmConfig.additional_config`; None before vLLM has one. Only its key "atom" is
                looked at: the others belong to other plugins.
            environ: the environment; only names with the prefix `ATOM_BRIDGE_` are looked at.

        Raises:
            ValueError: an unknown name, a value of the wrong type, or one that does not exist; one line that says what,
                why, and the way out.
        """
        values = _from_environment(environ)
        # vLLM also takes an object of another plugin's there.
        if isinstance(additional_config, Mapping):
            values.update(_from_config(additional_config.get(SECTION)))
        return cls(**values)

    @property
    def disabled_patches(self) -> frozenset[str]:
        """The ids in `disable_patch`."""
        return frozenset(_listed(self.disable_patch))

    def as_dict(self) -> dict[str, Any]:
        """Name → value, in the order of the documentation."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of `environ` that carry our prefix, sorted by name; whether they are known is not checked."""
    return {name: environ[name] for name in sorted(environ) if name.startswith(PREFIX)}


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    known = {
        item.metadata["variable"]: item
        for item in fields(Settings)
        if item.metadata["variable"]
    }
    values = {}
    for name, text in environment(environ).items():
        if name not in known:
            raise ValueError(
                f"The environment variable {name} is not known{_nearest(name, known)}. "
                f"Known are {', '.join(known)}; unset the other."
            )
        item = known[name]
        if isinstance(item.default, bool):
            if text.strip().lower() not in _SWITCH:
                raise ValueError(
                    f"{name}={text} is neither on nor off. Set it to 1 or 0."
                )
            values[item.name] = _SWITCH[text.strip().lower()]
        else:
            values[item.name] = _chosen(item, text, name)
    _refuse_unknown_patches(str(values.get("disable_patch", "")))
    return values


def _refuse_unknown_patches(text: str) -> None:
    """Raise ValueError for an id that no patch has."""
    asked = _listed(text)
    if not asked:
        return
    from atom_vllm_bridge.patches import registry

    known = [patch.id for patch in registry.load()]
    for id in asked:
        if id not in known:
            raise ValueError(
                f"{registry.VARIABLE} names the patch {id!r}, which does not exist{_nearest(id, known)}. "
                f"Set one or more of: {', '.join(known)}."
            )


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _from_config(section: Any) -> dict[str, Any]:
    if section is None:
        return {}
    where = f'"{SECTION}" in --additional-config'
    if not isinstance(section, Mapping):
        raise ValueError(
            f"{where} is {json.dumps(section, default=str)}, but it holds settings by name: "
            f'write {{"{SECTION}": {{"state_layout": "paged"}}}}.'
        )
    known = {item.name: item for item in fields(Settings) if item.metadata["in_config"]}
    variables = {
        item.name: item.metadata["variable"]
        for item in fields(Settings)
        if item.name not in known
    }
    values = {}
    for name, value in section.items():
        if name in variables:
            raise ValueError(
                f"{where} cannot set {name!r}: it is needed before vLLM has read --additional-config. "
                f"Set the environment variable {variables[name]} instead."
            )
        if name not in known:
            raise ValueError(
                f"{where} has the unknown key {name!r}{_nearest(str(name), known)}. "
                f"Known are {', '.join(known)}; remove the other."
            )
        item = known[name]
        if item.metadata["or_number"] and type(value) is int:
            value = str(value)
        if type(value) is not type(item.default):
            raise ValueError(
                f"{where} sets {name!r} to {json.dumps(value, default=str)}, which is not a "
                f"{_kind(item)}; the default is {json.dumps(item.default)}."
            )
        values[name] = _chosen(item, value, f"{name!r} under {where}")
    return values


def _chosen(item: Field[Any], value: Any, where: str) -> Any:
    choices = item.metadata["choices"]
    if item.metadata["or_number"] and value.isdecimal():
        return value
    if choices and value not in choices:
        raise ValueError(
            f"{where} is {value!r}, which does not exist{_nearest(str(value), choices)}. "
            f"Set one of: {', '.join(choices)}{_NUMBER if item.metadata['or_number'] else ''}."
        )
    return value


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _kind(item: Field[Any]) -> str:
    return {bool: "boolean", str: "string", int: "number"}[type(item.default)]


def _code(text: str) -> str:
    return f"`{text}`"


def settings_page() -> str:
    """The text of `docs/settings.md`: one row a setting, from the metadata of the fields above."""
    rows = []
    for item in fields(Settings):
        variable, choices = item.metadata["variable"], item.metadata["choices"]
        about = item.metadata["about"]
        if choices:
            number = _NUMBER if item.metadata["or_number"] else ""
            about += f" Values: {', '.join(map(_code, choices))}{number}."
        cells = (
            item.name,
            _code(variable) if variable else "–",
            _code(item.name) if item.metadata["in_config"] else "–",
            _kind(item),
            _code(json.dumps(item.default)),
            about,
        )
        rows.append(f"| {' | '.join(cells)} |")
    return _PAGE.format(rows="\n".join(rows), section=SECTION, prefix=PREFIX)


_PAGE = """\
# Settings

A setting comes from an environment variable, or from the object `{section}` in vLLM's `--additional-config`:

```
ATOM_BRIDGE_OPS=torch vllm serve MODEL
vllm serve MODEL --additional-config '{{"{section}": {{"state_layout": "paged"}}}}'
```

Where both give one, `--additional-config` counts. A switch is `1` or `0`. A name that is not in this table, under
`{section}` or with the prefix `{prefix}`, stops the start with one line that says which.

| setting | environment variable | key under `{section}` | type | default | meaning |
|---|---|---|---|---|---|
{rows}

This page is made from the code: `make docs` writes it.
"""


if __name__ == "__main__":
    print(settings_page(), end="")
