"""Where tests of Triton's ops run: on a GPU, or else in a process of their own, in which Triton is interpreted.

Triton looks at its switch when it is imported, and other tests of this process may need it as it is.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = "ATOM_BRIDGE_TEST_INTERPRETED"
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"

if os.environ.get(HERE):
    os.environ["TRITON_INTERPRET"] = "1"

runs = pytest.mark.kernel
gpu_only = pytest.mark.real_size
outside = pytest.mark.interpreting


def elsewhere(item: pytest.Item) -> bool:
    """Whether a test is not for this process: what has a kernel runs on a GPU or under the interpreter."""
    if item.get_closest_marker("kernel") and not ON_GPU and HERE not in os.environ:
        return True
    if item.get_closest_marker("real_size") and not ON_GPU:
        return True
    interpreting = item.get_closest_marker("interpreting") is not None
    return interpreting and (ON_GPU or HERE in os.environ)


def run_interpreted(file: str) -> None:
    """Run the tests of a file under the interpreter; what they print is the failure."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", file],
        env={**os.environ, HERE: "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
