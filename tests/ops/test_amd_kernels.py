"""Triton's kernels compile for AMD's GPUs, on a machine without one. benchmarks/amd_kernels.py compiles more cases, and lists all."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from atom_vllm_bridge.models.ops import triton as triton_ops

ROOT = Path(__file__).parents[2]
LOCAL_MEMORY = {"gfx942": 64 << 10, "gfx950": 160 << 10}
# Of each kernel the case that is compiled fastest.
CASES = [
    "hc_pre, 128 tokens",
    "hc_post",
    "request_of_token",
    "tiles",
    "rotations",
    "slot_rows",
    "ring_slots",
    "window_rows",
    "block_rows",
    "entry_rows",
    "selected_rows",
    "pooled_rows, packed",
    "rms_norm",
    "rope",
    "query_heads",
    "swiglu",
    "router, hash, 128 tokens",
    "write_keys, fp8_row",
    "write_inputs",
    "write_rows",
    "compressor_pool, index",
    "indexer_logits, float32",
    "indexer_topk, few",
    "sparse_attention, float32",
    "linear, 64 rows",
    "linear, unpacked",
    "experts",
]


def launched():
    """Names of what ops/triton launches, by its text: a kernel, and its grid in brackets."""
    found = set()
    for path in triton_ops.__path__:
        for file in Path(path).glob("*.py"):
            found |= set(re.findall(r"^\s+(\w+)\[.+\]\($", file.read_text(), re.M))
    return found


@pytest.mark.parametrize("target", LOCAL_MEMORY)
def test_every_kernel_compiles_and_fits(target, tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "benchmarks/amd_kernels.py",
            "--json",
            "--target",
            target,
            *CASES,
        ],
        # What serves a model on a CPU in this process has kernels interpreted.
        env={
            **os.environ,
            "TRITON_CACHE_DIR": str(tmp_path),
            "TRITON_INTERPRET": "0",
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["kernel"] for line in found} == launched()
    for line in found:
        assert line["target"] == target
        assert 0 < line["vgprs"] <= 512
        assert line["local"] <= LOCAL_MEMORY[target]
        assert line["spilled"] == 0, line


def test_the_page_lists_every_kernel_on_both_architectures_within_its_memory():
    page = (ROOT / "docs" / "amd-kernels.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith(("| _", "| collapse"))
    ]
    for target, limit in LOCAL_MEMORY.items():
        of_target = [row for row in rows if row[2] == target]
        assert {row[0] for row in of_target} == launched()
        assert all(int(row[5]) <= limit for row in of_target)
