"""A replaced kernel learns its launch grid, and may be launched with options.

A Triton kernel reads the grid through tl.program_id and tl.num_programs; a stand-in
registered with vLLM's `register_kernels` cannot, because KernelOverride ignores what
stands between the brackets of ``kernel[grid](...)``. It also refuses launch options
(num_warps) when every argument is given by keyword. Both are mended for a stand-in
that asks, by a keyword-only parameter `grid` (and ``**options``); any other one is
launched as before.
"""

import functools
from collections.abc import Callable
from typing import Any

from atom_vllm_bridge.patches.registry import PATCHES, Fingerprint, Patch


def keep_grid(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A ``__getitem__`` that hands the grid to those who ask for it.

    The grid arrives as a tuple of ints: an int is wrapped, and a callable is called
    with the launch arguments by name, as Triton does.
    """

    def __getitem__(self: Any, grid: Any) -> Callable[..., Any]:
        if not _asks_for_grid(self._impl):
            return original(self, grid)
        if type(grid) is tuple:
            return functools.partial(self._impl, grid=grid)
        if isinstance(grid, int):
            return functools.partial(self._impl, grid=(grid,))

        def launch(*args: Any, **kwargs: Any) -> Any:
            named = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
            sizes = grid(named) if callable(grid) else grid
            return self._impl(*args, grid=tuple(sizes), **kwargs)

        return launch

    return __getitem__


@functools.cache
def _asks_for_grid(implementation: Callable[..., Any]) -> bool:
    code = getattr(implementation, "__code__", None)
    if code is None:
        return False
    keyword_only = slice(code.co_argcount, code.co_argcount + code.co_kwonlyargcount)
    return "grid" in code.co_varnames[keyword_only]


def _vllm_keeps_the_grid() -> bool:
    import inspect

    from vllm.triton_utils.dispatcher import KernelOverride

    return "grid" in inspect.signature(KernelOverride._launch).parameters


PATCHES.add(
    Patch(
        id="override-grid",
        target="vllm.triton_utils.dispatcher:KernelOverride.__getitem__",
        runner="v2",
        process="worker",
        why=(
            "A replaced kernel is launched without its grid, so it cannot tell how "
            "many programs were asked for."
        ),
        upstream="no issue known",
        without="DeepSeek-V4 does not start on a CPU; elsewhere nothing changes.",
        test="tests/plugin/test_patches.py::TestOverrideGrid::test_without_it_the_grid_is_lost",
        remove_when=_vllm_keeps_the_grid,
        expects=Fingerprint(signature="(self, grid)", source="8f530e45ce6e725e"),
        apply=keep_grid,
        needed_on="cpu",
    )
)
