"""Every file of tests begins with the same state of the process, whatever ran before it."""

import pytest
import torch

from atom_vllm_bridge.models.ops import registry


@pytest.fixture(scope="module", autouse=True)
def a_process_as_new():
    registry.configure("")
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
