"""The patch registry: what it applies, what it refuses, and the way back."""

import ast
import multiprocessing
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atom_vllm_bridge.patches import registry
from atom_vllm_bridge.patches.page import patches_page
from atom_vllm_bridge.patches.registry import (
    ALREADY_UPSTREAM,
    APPLIED,
    DECLARED,
    NOT_APPLICABLE,
    REFUSED,
    TURNED_OFF,
    Duty,
    Fingerprint,
    Patch,
    Registry,
    fingerprint,
)

ROOT = Path(__file__).resolve().parents[2]
MODULE = "host_of_patches"
IDS = [patch.id for patch in registry.load()]
DUTIES = {duty.id: duty for duty in registry.load().duties()}


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


@pytest.fixture(autouse=True)
def as_they_were() -> Iterator[None]:
    """What engines of this process rely on stays applied: vLLM loads a plugin once."""
    patches = registry.load()
    applied = [p.id for p in patches if patches.state(p.id).name == APPLIED]
    yield
    for id in applied:
        patches.apply(id)


def test_every_patch_of_the_project_fits_the_installed_vllm() -> None:
    patches = registry.load()
    assert "override-grid" in [patch.id for patch in patches]
    for patch in patches:
        state = patches.apply(patch.id)
        assert state.name in (APPLIED, ALREADY_UPSTREAM), f"{patch.id}: {state}"
        patches.restore(patch.id)


@pytest.mark.parametrize("id", IDS)
def test_the_installed_vllm_still_needs_each_patch(id: str) -> None:
    """When this fails, the patch goes: vLLM does by itself what it was for."""
    assert not registry.load()[id].remove_when()


@pytest.mark.parametrize("id", IDS)
def test_no_patch_of_the_project_touches_a_vllm_that_it_was_not_written_for(
    id: str,
) -> None:
    patch = registry.load()[id]
    registry.load().restore(id)
    owner, _, attribute = patch.target.rpartition(".")
    if ":" not in owner:
        owner, _, attribute = patch.target.partition(":")
        stock = vars(sys.modules[owner])[attribute]
        gone = f"{owner}:gone"
    else:
        stock = vars(registry.find(owner))[attribute]
        gone = f"{owner}.gone"
    signature = replace(patch.expects, signature="(anything)")
    body = replace(patch.expects, source="0" * 16)
    for changes, reason in (
        ({"target": gone}, "gone"),
        ({"expects": signature}, f"the signature of {patch.target} has changed"),
        ({"expects": body}, f"the body of {patch.target} has changed"),
    ):
        other = Registry()
        other.add(replace(patch, **changes))
        state = other.apply(id)
        assert state.name == REFUSED
        assert reason in state.reason
    solved = Registry()
    solved.add(replace(patch, remove_when=lambda: True))
    assert solved.apply(id).name == ALREADY_UPSTREAM
    where = registry.find(owner) if ":" in owner else sys.modules[owner]
    assert vars(where)[attribute] is stock


@pytest.mark.parametrize("duty", DUTIES.values(), ids=DUTIES)
def test_each_duty_is_done_by_a_hook_of_the_installed_vllm(duty: Duty) -> None:
    assert registry.load().apply(duty.id).name == ALREADY_UPSTREAM
    assert registry.find(duty.used) is not None
    assert duty.hook.startswith("vllm.")
    assert duty.used.startswith("atom_vllm_bridge.")


@pytest.mark.parametrize(
    "node",
    sorted({entry.test for entry in [*registry.load(), *DUTIES.values()]}),
)
def test_each_test_that_is_named_exists(node: str) -> None:
    path, *names = node.split("::")
    body: list[ast.stmt] = ast.parse((ROOT / path).read_text()).body
    for name in names:
        (found,) = [
            part
            for part in body
            if isinstance(part, (ast.ClassDef, ast.FunctionDef)) and part.name == name
        ]
        body = found.body
    assert names[-1].startswith("test_")


def test_the_page_in_docs_is_the_generated_one() -> None:
    page = (ROOT / "docs/patches.md").read_text(encoding="utf-8")
    assert page == patches_page()
    assert page.count("\n### ") == len(IDS)
    assert all(f"\n| {id} | " in page for id in DUTIES)


def apply_in_child(results: Any) -> None:
    from atom_vllm_bridge import plugin

    plugin.register_models()  # as vLLM does in every process that it starts
    patches = registry.load()
    patches.apply_all(runner="v2", process="worker")
    results.put(patches.table())


def in_a_spawned_child() -> list[dict[str, str]]:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    child = context.Process(target=apply_in_child, args=(results,))
    child.start()
    from_child = results.get(timeout=120)
    child.join(timeout=60)
    assert child.exitcode == 0
    return from_child


def test_a_spawned_child_has_the_same_table() -> None:
    from_child = in_a_spawned_child()
    patches = registry.load()
    for patch in patches:
        patches.restore(patch.id)
    patches.apply("draft-length", process="engine")
    patches.apply_all(runner="v2", process="worker")
    here = patches.table()
    for patch in patches:
        patches.restore(patch.id)
    assert from_child == here
    assert any(row["state"] == APPLIED for row in here)


def test_a_spawned_child_leaves_out_what_is_turned_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ATOM_BRIDGE_DISABLE_PATCH", "draft-length, kernel-scan")
    states = {row["id"]: row["state"] for row in in_a_spawned_child()}
    # In a worker, a patch for the engine is not asked for again.
    assert states == {
        "draft-length": NOT_APPLICABLE,
        "early-look": NOT_APPLICABLE,
        "kernel-scan": TURNED_OFF,
        "override-grid": APPLIED,
    }


class TestWithout:
    """What two patches are for: the day one of these fails, vLLM does it itself."""

    @pytest.fixture(autouse=True)
    def stock(self) -> None:
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        patches = registry.load()
        for id in ("draft-length", "early-look"):
            patches.restore(id)

    @staticmethod
    def configure(checkpoint: Path, **options: Any) -> Any:
        from vllm.engine.arg_utils import EngineArgs

        return EngineArgs(
            model=str(checkpoint), max_model_len=512, **options
        ).create_engine_config()

    def test_a_method_alone_is_incomplete(self, small_dspark: Path) -> None:
        method = {"method": "dspark"}
        with pytest.raises(
            ValueError, match="num_speculative_tokens must be provided"
        ) as error:
            self.configure(small_dspark, speculative_config=dict(method))
        assert "atom-vllm-bridge" not in str(error.value)
        registry.load().apply("draft-length")
        config = self.configure(small_dspark, speculative_config=dict(method))
        assert config.speculative_config.num_speculative_tokens == 5

    def test_the_mode_that_was_asked_for_is_gone(
        self, small_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As early as the platform is shown the configuration."""
        from vllm.config import CompilationConfig, CompilationMode
        from vllm.platforms import current_platform

        seen = []
        shown = type(current_platform).apply_config_platform_defaults.__func__

        def look(cls: type, config: Any) -> None:
            seen.append((config.compilation_config.mode, config.additional_config))
            shown(cls, config)

        monkeypatch.setattr(
            type(current_platform), "apply_config_platform_defaults", classmethod(look)
        )
        asked = CompilationMode.VLLM_COMPILE
        patches = registry.load()
        for wanted in (False, True):
            if wanted:
                patches.apply("early-look")
            else:
                # Making a configuration would apply it.
                patches.turn_off(["early-look"])
            self.configure(
                small_checkpoint, compilation_config=CompilationConfig(mode=asked)
            )
            patches.turn_off([])
            mode, additional = seen[-1]
            assert mode == CompilationMode.NONE
            assert additional.get("atom_asked", {}).get("compilation") == (
                asked.name if wanted else None
            )


class TestOverrideGrid:
    """The first entry, on vLLM's own KernelOverride."""

    @pytest.fixture(autouse=True)
    def applied(self) -> Iterator[None]:
        patches = registry.load()
        was = patches.state("override-grid").name
        assert patches.apply("override-grid").name == APPLIED
        yield
        if was != APPLIED:
            patches.restore("override-grid")

    @staticmethod
    def launched(implementation: Callable[..., Any]) -> Any:
        from vllm.triton_utils.dispatcher import KernelOverride

        def kernel(x, n, BLOCK): ...

        return KernelOverride(kernel, implementation)

    def test_an_implementation_that_asks_gets_the_grid(self) -> None:
        def implementation(x, n, BLOCK, *, grid, **options):
            return x, n, BLOCK, grid, options

        override = self.launched(implementation)
        assert override[(2, 3)](1, 2, BLOCK=4) == (1, 2, 4, (2, 3), {})
        assert override[5](1, 2, 4)[3] == (5,)
        assert override[[6, 7]](1, 2, 4)[3] == (6, 7)

    def test_launch_options_reach_it(self) -> None:
        def implementation(x, n, BLOCK, *, grid, **options):
            return options

        override = self.launched(implementation)
        assert override[(1,)](x=1, n=2, BLOCK=4, num_warps=8) == {"num_warps": 8}

    def test_a_grid_may_be_computed_from_the_arguments(self) -> None:
        def implementation(x, n, BLOCK, *, grid):
            return grid

        override = self.launched(implementation)
        grid = lambda meta: (meta["n"] // meta["BLOCK"],)  # noqa: E731
        assert override[grid](1, 12, BLOCK=4) == (3,)

    def test_any_other_implementation_is_launched_as_before(self) -> None:
        def implementation(x, n, BLOCK):
            return x, n, BLOCK

        override = self.launched(implementation)
        assert override[(9,)](1, 2, BLOCK=4) == (1, 2, 4)
        assert override[(9,)](n=2, BLOCK=4, x=1) == (1, 2, 4)
        with pytest.raises(TypeError, match="num_warps"):
            override[(9,)](1, 2, 4, num_warps=4)

    def test_without_it_the_grid_is_lost(self) -> None:
        """What the patch is for: the day this fails, vLLM keeps the grid itself."""

        def implementation(x, n, BLOCK, *, grid=None):
            return grid

        registry.load().restore("override-grid")
        assert self.launched(implementation)[(9,)](1, 2, 4) is None


class TestKernelScan:
    """The second entry, on vLLM's own scan and the object that trips it."""

    def test_without_it_numba_stops_the_scan(self) -> None:
        import numba  # noqa: F401  vLLM requires it
        from llvmlite.binding import ffi
        from vllm.triton_utils import dispatcher

        patches = registry.load()
        was = patches.state("kernel-scan").name
        patches.restore("kernel-scan")
        with pytest.raises(AttributeError, match="has no attribute 'get'"):
            dispatcher._rebind_kernels([])
        patches.apply("kernel-scan")
        handle = ffi.lib
        dispatcher._rebind_kernels([])
        assert ffi.lib is handle
        if was != APPLIED:
            patches.restore("kernel-scan")

    def test_a_kernel_is_still_found_wherever_it_is_held(self) -> None:
        from vllm.triton_utils import dispatcher

        def kernel(x): ...

        holder = types.ModuleType("holder")
        holder.kernel = kernel
        sys.modules["holder"] = holder
        patches = registry.load()
        was = patches.state("kernel-scan").name
        patches.apply("kernel-scan")
        try:
            wrapper = dispatcher.KernelOverride(kernel, kernel)
            dispatcher._rebind_kernels([(kernel, wrapper)])
            assert holder.kernel is wrapper
        finally:
            del sys.modules["holder"]
            if was != APPLIED:
                patches.restore("kernel-scan")

    def test_other_threads_see_every_attribute_during_the_scan(self) -> None:
        import numba  # noqa: F401
        from llvmlite.binding import ffi
        from vllm.triton_utils import dispatcher

        seen = []

        class Sentinel(types.ModuleType):
            """When the scan arrives here, another thread looks at the handle."""

            def __getattribute__(self, name: str) -> Any:
                if name == "__dict__":
                    look = threading.Thread(
                        target=lambda: seen.append("lib" in vars(ffi))
                    )
                    look.start()
                    look.join()
                return super().__getattribute__(name)

        patches = registry.load()
        was = patches.state("kernel-scan").name
        patches.apply("kernel-scan")
        sys.modules["sentinel"] = Sentinel("sentinel")
        try:
            dispatcher._rebind_kernels([])
        finally:
            del sys.modules["sentinel"]
            if was != APPLIED:
                patches.restore("kernel-scan")
        assert seen
        assert all(seen)
