"""The patch registry, on a class that stands in for vLLM's: what it applies, what it refuses, and the way back."""

import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from atom_vllm_bridge.patches.registry import (
    ALREADY_UPSTREAM,
    APPLIED,
    DECLARED,
    NOT_APPLICABLE,
    REFUSED,
    Duty,
    Fingerprint,
    Patch,
    Registry,
    fingerprint,
)

MODULE = "host_of_patches"


class Engine:
    """Stands in for a class of vLLM."""

    def step(self, tokens: int, extra: int = 0) -> str:
        return f"stock {tokens} {extra}"

    @staticmethod
    def slots(count: int) -> list[int]:
        return list(range(count))

    @classmethod
    def named(cls) -> str:
        return cls.__name__


class Derived(Engine):
    pass


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    module = types.ModuleType(MODULE)
    module.Engine = Engine  # type: ignore[attr-defined]
    module.Derived = Derived  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE, module)
    before = {name: vars(Engine)[name] for name in ("step", "slots", "named")}
    yield module
    for name, value in before.items():
        setattr(Engine, name, value)


def louder(original: Callable[..., str]) -> Callable[..., str]:
    def step(self: Engine, tokens: int, extra: int = 0) -> str:
        return original(self, tokens, extra).upper()

    return step


PATCH = Patch(
    id="louder",
    target=f"{MODULE}:Engine.step",
    runner="v2",
    process="worker",
    why="It is too quiet.",
    upstream="no issue known",
    without="It stays quiet.",
    test="tests/plugin/test_patch_registry.py::test_a_patch_is_applied",
    remove_when=lambda: False,
    expects=fingerprint(Engine.step),
    apply=louder,
)


def registry_of(**changes: Any) -> Registry:
    patches = Registry()
    patches.add(replace(PATCH, **changes))
    return patches


def test_a_patch_is_applied() -> None:
    patches = registry_of()
    assert patches.state("louder").name == DECLARED
    assert patches.apply("louder", runner="v2", process="worker").name == APPLIED
    assert Engine().step(3) == "STOCK 3 0"


def test_applying_twice_is_once() -> None:
    calls = []

    def counted(original: Callable[..., str]) -> Callable[..., str]:
        calls.append(original)
        return louder(original)

    patches = registry_of(apply=counted)
    patches.apply_all(runner="v2", process="worker")
    patched = Engine.step
    assert patches.apply_all(runner="v2", process="worker")["louder"].name == APPLIED
    assert Engine.step is patched
    assert len(calls) == 1


def test_restoring_undoes_it() -> None:
    patches, stock = registry_of(), Engine.step
    patches.apply("louder")
    patches.restore("louder")
    assert Engine.step is stock
    assert patches.state("louder").name == DECLARED
    patches.restore("louder")
    assert Engine.step is stock
    assert patches.apply("louder").name == APPLIED


def test_restoring_leaves_a_later_patch_of_others_alone() -> None:
    patches = registry_of()
    patches.apply("louder")
    Engine.step = lambda self, tokens: "other"  # type: ignore[method-assign,assignment]
    with pytest.raises(RuntimeError, match="replaced again by something else"):
        patches.restore("louder")
    assert Engine().step(1) == "other"


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("no_such_module_at_all:step", "No module named"),
        (f"{MODULE}:Engine.leap", "does not define leap"),
        (f"{MODULE}:Motor.step", "no attribute 'Motor'"),
        (f"{MODULE}:Derived.step", "Derived does not define step"),
    ],
)
def test_an_unknown_target_is_refused(target: str, reason: str) -> None:
    patches = registry_of(target=target)
    state = patches.apply("louder")
    assert state.name == REFUSED
    assert target in state.reason
    assert reason in state.reason


def test_a_changed_signature_is_refused() -> None:
    expects = Fingerprint("(self, tokens)", PATCH.expects.source)
    patches = registry_of(expects=expects)
    state = patches.apply("louder")
    assert state.name == REFUSED
    assert f"the signature of {PATCH.target} has changed" in state.reason
    assert "(self, tokens, extra=0)" in state.reason
    assert Engine().step(3) == "stock 3 0"


def test_a_changed_body_is_refused() -> None:
    def step(self: Engine, tokens: int, extra: int = 0) -> str:
        return f"changed {tokens}"

    Engine.step = step  # type: ignore[method-assign]
    state = registry_of().apply("louder")
    assert state.name == REFUSED
    assert f"the body of {PATCH.target} has changed" in state.reason
    assert Engine().step(3) == "changed 3"


def test_a_target_without_source_is_refused(host: types.ModuleType) -> None:
    host.builtin = len  # type: ignore[attr-defined]
    state = registry_of(target=f"{MODULE}:builtin").apply("louder")
    assert state.name == REFUSED
    assert "cannot be read" in state.reason


def test_what_vllm_has_fixed_is_left_alone() -> None:
    stock = Engine.step
    patches = registry_of(remove_when=lambda: True, target="gone:gone")
    assert patches.apply("louder").name == ALREADY_UPSTREAM
    assert Engine.step is stock


def test_what_is_turned_off_is_left_alone() -> None:
    patches, stock = registry_of(), Engine.step
    patches.turn_off(["louder"])
    state = patches.apply("louder", runner="v2", process="worker")
    assert str(state) == "turned_off(by ATOM_BRIDGE_DISABLE_PATCH)"
    assert Engine.step is stock
    assert patches.apply("louder", runner="v1").name == NOT_APPLICABLE
    patches.turn_off([])
    assert patches.apply("louder").name == APPLIED
    patches.turn_off(["louder"])
    assert patches.apply("louder").name == APPLIED, "what engines rely on stays"


@pytest.mark.parametrize(
    ("hook", "state", "reason"),
    [
        (f"{MODULE}:Engine.step", ALREADY_UPSTREAM, ""),
        (f"{MODULE}:Engine.leap", REFUSED, f"lacks the hook {MODULE}:Engine.leap"),
        ("no_such_module_at_all:Engine", REFUSED, "No module named"),
    ],
)
def test_a_duty_is_done_if_its_hook_is_there(
    hook: str, state: str, reason: str
) -> None:
    patches, stock = Registry(), Engine.step
    patches.add(Duty("step", "Engine.step", "Step.", hook, "here:this", "there::test"))
    found = patches.apply("step", runner="v2")
    assert found.name == state
    assert reason in found.reason
    assert Engine.step is stock
    assert list(patches) == []
    (row,) = patches.duty_table()
    assert (row["id"], row["state"], row["hook"]) == ("step", state, hook)


@pytest.mark.parametrize(
    ("runner", "process"), [("v1", "worker"), ("v2", "engine"), ("v1", "any")]
)
def test_another_runner_or_process_is_not_touched(runner: str, process: str) -> None:
    patches = registry_of()
    state = patches.apply("louder", runner=runner, process=process)
    assert state.name == NOT_APPLICABLE
    assert Engine().step(3) == "stock 3 0"


def test_an_applied_patch_stays_so_for_another_runner() -> None:
    patches = registry_of()
    patches.apply("louder", runner="v2", process="worker")
    assert patches.apply("louder", runner="v1", process="worker").name == APPLIED


def test_static_and_class_methods_stay_so() -> None:
    patches = Registry()
    patches.add(
        replace(
            PATCH,
            id="static",
            target=f"{MODULE}:Engine.slots",
            expects=fingerprint(Engine.slots),
            apply=lambda original: lambda count: original(count)[::-1],
        )
    )
    patches.add(
        replace(
            PATCH,
            id="class",
            target=f"{MODULE}:Engine.named",
            expects=fingerprint(vars(Engine)["named"].__func__),
            apply=lambda original: lambda cls: original(cls) + "!",
        )
    )
    assert {s.name for s in patches.apply_all().values()} == {APPLIED}
    assert Engine().slots(3) == Engine.slots(3) == [2, 1, 0]
    assert Derived.named() == "Derived!"
    patches.restore("static")
    patches.restore("class")
    assert Engine.slots(2) == [0, 1]
    assert Derived.named() == "Derived"


def test_an_id_is_taken_once() -> None:
    patches = registry_of()
    for entry in (PATCH, Duty("louder", "", "", "", "", "")):
        with pytest.raises(ValueError, match="louder: declared twice"):
            patches.add(entry)


def test_the_table_tells_state_and_reason() -> None:
    patches = registry_of(target="gone:gone")
    patches.apply("louder")
    (row,) = patches.table()
    assert row["id"] == "louder"
    assert row["state"] == REFUSED
    assert "No module named 'gone'" in row["reason"]
    assert row["why"] == PATCH.why


def test_a_fingerprint_ignores_annotations_and_indentation() -> None:
    assert fingerprint(Engine.step).signature == "(self, tokens, extra=0)"
    assert fingerprint(Engine.step) == PATCH.expects
    assert len(fingerprint(Engine.step).source) == 16
