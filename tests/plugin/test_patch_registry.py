"""The patch registry: what it applies, what it refuses, and the way back."""

import multiprocessing
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from atom_vllm_bridge.patches import registry
from atom_vllm_bridge.patches.registry import (
    ALREADY_UPSTREAM,
    APPLIED,
    DECLARED,
    NOT_APPLICABLE,
    REFUSED,
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
    expects = Fingerprint("(self, tokens)", PATCH.expects.source)  # type: ignore[union-attr]
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


def test_a_duty_of_a_hook_needs_no_patch() -> None:
    patches = registry_of(
        apply=None, expects=None, hook="Platform.hook", remove_when=lambda: True
    )
    assert patches.apply("louder").name == ALREADY_UPSTREAM
    missing = registry_of(
        apply=None, expects=None, hook="Platform.hook", remove_when=lambda: False
    )
    assert "lacks the hook Platform.hook" in missing.apply("louder").reason


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"apply": None, "expects": None}, "needs either"),
        ({"hook": "Platform.hook"}, "needs either"),
        ({"expects": None}, "needs `expects`"),
    ],
)
def test_a_patch_that_explains_nothing_is_rejected(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        registry_of(**changes)


def test_an_id_is_taken_once() -> None:
    patches = registry_of()
    with pytest.raises(ValueError, match="louder: declared twice"):
        patches.add(PATCH)


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


def apply_in_child(results: Any) -> None:
    patches = registry.load()
    patches.apply_all(runner="v2", process="worker")
    results.put(patches.table())


def test_a_spawned_child_has_the_same_table() -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    child = context.Process(target=apply_in_child, args=(results,))
    child.start()
    from_child = results.get(timeout=120)
    child.join(timeout=60)
    assert child.exitcode == 0
    patches = registry.load()
    for patch in patches:
        patches.restore(patch.id)
    patches.apply_all(runner="v2", process="worker")
    here = patches.table()
    for patch in patches:
        patches.restore(patch.id)
    assert from_child == here
    assert any(row["state"] == APPLIED for row in here)


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

    def test_kernels_can_be_replaced_once_numba_is_imported(self) -> None:
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
