"""What benchmarks of a GPU do in the right order; nothing is measured here."""

from contextlib import nullcontext
from unittest.mock import MagicMock

from benchmarks import gpu_ops


def test_calls_wait_for_what_they_read(monkeypatch):
    """Their tensors are made on the current stream, and the calls run on another."""
    happened = []
    cuda = MagicMock()
    cuda.current_stream.return_value = "current"
    cuda.stream.side_effect = lambda stream: nullcontext()
    cuda.graph.side_effect = lambda graph, stream: nullcontext()
    cuda.Stream.return_value.wait_stream.side_effect = happened.append
    cuda.Event.return_value.elapsed_time.return_value = 3.0
    monkeypatch.setattr(gpu_ops.torch, "cuda", cuda)
    took = gpu_ops.microseconds([lambda: happened.append("call")] * 3)
    assert took == 1e3
    # Two to warm up, and all to capture.
    assert happened == ["current", *["call"] * 5]
