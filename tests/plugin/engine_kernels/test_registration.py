"""Stand-ins are found, fit their kernels, and replace them where vLLM launches them."""

import inspect
import os
import subprocess
import sys
import textwrap

import pytest

import atom_vllm_bridge.engine_kernels as engine_kernels
from atom_vllm_bridge.engine_kernels import fingerprints, overrides, parameters_of

from .harness import original_kernel


def run(script: str) -> str:
    """Run in a fresh process, for registering changes vLLM for good; its output."""
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "WARNING", "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.mark.parametrize("name", sorted(overrides()))
def test_a_stand_in_has_its_kernels_parameters(name: str) -> None:
    stand_in, kernel = overrides()[name], original_kernel(name)
    assert parameters_of(stand_in) == tuple(kernel.arg_names)
    kinds = {p.name: p.kind for p in inspect.signature(stand_in).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD in kinds.values(), "takes no launch options"
    if "grid" in kinds:
        assert kinds["grid"] is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize("name", sorted(overrides()))
def test_a_stand_in_was_written_against_the_kernel_of_this_vllm(name: str) -> None:
    assert fingerprints.digest(original_kernel(name)) == fingerprints.KERNELS.get(name)


def test_two_files_cannot_replace_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from atom_vllm_bridge.engine_kernels import block_table, memory

    monkeypatch.setattr(memory, "OVERRIDES", dict(block_table.OVERRIDES), raising=False)
    with pytest.raises(ValueError, match=r"memory replaces .*_gather_block_tables"):
        overrides()


def test_an_unknown_name_is_not_registered() -> None:
    with pytest.raises(KeyError):
        engine_kernels.register(only=["vllm.v1.worker.gpu.no_such_kernel"])


def test_a_kernel_that_changed_stays_interpreted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = "vllm.v1.attention.ops.metadata._token_request_mapping_kernel"
    before = engine_kernels.find_kernel(name)
    monkeypatch.setattr(engine_kernels, "_registered", set())
    monkeypatch.setitem(fingerprints.KERNELS, name, "of another vLLM")
    assert engine_kernels.register(only=[name]) == []
    assert engine_kernels.find_kernel(name) is before
    assert f"{name} stays interpreted, and slow: its code" in caplog.text


def test_a_kernel_that_is_gone_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gone = "vllm.v1.worker.gpu.block_table._gone_kernel"
    monkeypatch.setattr(engine_kernels, "overrides", lambda: {gone: print})
    assert engine_kernels.register() == []
    assert f"{gone} is not in this vLLM" in caplog.text


def test_vllm_launches_the_stand_ins() -> None:
    """Through vLLM's own functions, with the interpreter made to fail."""
    output = run("""
        from atom_vllm_bridge.engine_kernels import interpreter, overrides, register
        interpreter.install()
        first, again = register(), register()
        assert len(first) == len(overrides()), set(overrides()) - set(first)
        assert again == []

        import torch
        from triton.runtime.interpreter import GridExecutor
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
        from vllm.v1.worker.gpu.block_table import BlockTables
        from vllm.v1.worker.gpu.input_batch import prepare_pos_seq_lens
        from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores

        def refuse(*args, **kwargs):
            raise AssertionError("a kernel was interpreted")

        GridExecutor.__call__ = refuse

        position = torch.full((9,), -5)
        seq_lens = torch.full((4,), -5, dtype=torch.int32)
        loc = torch.tensor([0, 2, 5], dtype=torch.int32)
        computed = torch.tensor([7, 0, 9], dtype=torch.int32)
        prepare_pos_seq_lens(torch.tensor([2, 1]), loc, computed, position, seq_lens)
        print(position.tolist(), seq_lens.tolist())

        tables = BlockTables([4, 8], 3, 16, [6, 3], torch.device("cpu"))
        tables.append_block_ids(1, ([5, 6, 7], [2, 3]), overwrite=True)
        tables.apply_staged_writes()
        slots = torch.tensor([1, 1])
        print([t.tolist() for t in tables.gather_block_tables(slots[:1], 2)])
        mapping = tables.compute_slot_mappings(
            slots[:1], torch.tensor([0, 3], dtype=torch.int32), torch.arange(3, 6), 4
        )
        print(mapping.tolist())

        logits = torch.tensor([[1.0, 4.0, 2.0, 3.0]])
        masked = apply_top_k_top_p(logits.clone(), torch.tensor([2]), None)
        print(masked.tolist())
        scores = compute_topk_scores(logits, 2, torch.tensor([3]))
        print(scores.logprob_token_ids.tolist(), scores.selected_token_ranks.tolist())
        """)
    assert output.splitlines() == [
        "[9, 10, 0, 1, 2, -5, -5, -5, -5] [11, 3, 0, 0]",
        "[[[5, 6, 7, 0, 0, 0], [0, 0, 0, 0, 0, 0]], [[2, 3, 0], [0, 0, 0]]]",
        "[[23, 24, 25, -1], [19, 20, 21, -1]]",
        "[[-inf, 4.0, -inf, 3.0]]",
        "[[3, 1, 3]] [2]",
    ]
