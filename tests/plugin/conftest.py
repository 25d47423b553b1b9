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
def small_dspark(tmp_path_factory):
    """The same target as `small_checkpoint`, with three DSpark stages."""
    return _with_draft(tmp_path_factory, "dspark")


@pytest.fixture(scope="session")
def small_mtp(tmp_path_factory):
    """The same target as `small_checkpoint`, with an MTP layer."""
    return _with_draft(tmp_path_factory, "mtp")


def _with_draft(tmp_path_factory, draft):
    from atom_vllm_bridge.checkpoint.make import make

    return make(
        tmp_path_factory.mktemp("checkpoints") / f"small-{draft}",
        layout="bf16",
        draft=draft,
        overrides=SMALL,
    )


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    from atom_vllm_bridge.checkpoint.make import make

    return make(tmp_path_factory.mktemp("checkpoints") / "tiny", layout="mxfp4")
