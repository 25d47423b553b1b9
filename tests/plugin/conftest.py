"""Checkpoints, made once a session."""

import pytest
from engines import SMALL


@pytest.fixture(scope="session")
def small_checkpoint(tmp_path_factory):
    from atom_vllm_bridge.checkpoint.make import make

    return make(
        tmp_path_factory.mktemp("checkpoints") / "small",
        layout="bf16",
        draft="none",
        overrides=SMALL,
    )


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    from atom_vllm_bridge.checkpoint.make import make

    return make(tmp_path_factory.mktemp("checkpoints") / "tiny", layout="mxfp4")
