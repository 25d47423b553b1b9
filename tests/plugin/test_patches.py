"""The project's own patches and duties, on the vLLM that is installed."""

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
    NOT_APPLICABLE,
    REFUSED,
    TURNED_OFF,
    Duty,
    Registry,
)

ROOT = Path(__file__).resolve().parents[2]
IDS = [patch.id for patch in registry.load()]
DUTIES = {duty.id: duty for duty in registry.load().duties()}


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
    owner, attribute, stock = registry._resolve(patch.target)
    signature = replace(patch.expects, signature="(anything)")
    body = replace(patch.expects, source="0" * 16)
    for changes, reason in (
        ({"target": f"{patch.target}_gone"}, f"does not define {attribute}_gone"),
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
    assert vars(owner)[attribute] is stock


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
    """On vLLM's own KernelOverride."""

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
    """On vLLM's own scan and the object that trips it."""

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
