"""Checkpoints, made once a session; and a check of the marks of features."""

import features
import pytest
from engines import SHALLOW, SMALL, Engine
from installations import Environment


@pytest.fixture(autouse=True)
def as_marked(request):
    """A test that is marked `covers` has asked an engine that has all of these features; a server's are in its flags."""
    Engine.asked.clear()
    yield
    covers = features.covered(request.node)
    if covers and "server" not in request.fixturenames:
        ran = [one for one in Engine.asked if covers.items() <= one.items()]
        assert ran, f"marked {covers}, but asked {Engine.asked}"


@pytest.fixture
def empty(tmp_path):
    """An environment with the bridge and nothing else."""
    return Environment(tmp_path)


@pytest.fixture(scope="session")
def six_layers(tmp_path_factory):
    """A small checkpoint with every kind of layer and three draft stages."""
    from atom_vllm_bridge.checkpoint.make import make

    out = tmp_path_factory.mktemp("checkpoints") / "six-layers"
    return make(out, "tiny", "mxfp4", layers=6)


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


@pytest.fixture(scope="session")
def schoolbook(tmp_path_factory):
    """The trained checkpoint, as `make serve` serves it."""
    from atom_vllm_bridge.checkpoint.make import make

    return make(tmp_path_factory.mktemp("checkpoints") / "schoolbook", "schoolbook")


@pytest.fixture(scope="session")
def agreeing_dspark(tmp_path_factory):
    """A target of SHALLOW, and two DSpark stages that often agree with it."""
    return _shallow(tmp_path_factory, "dspark", "agreeing")


@pytest.fixture(scope="session")
def headless_dspark(tmp_path_factory):
    """The checkpoint of `agreeing_dspark`, but without a confidence head."""
    return _shallow(
        tmp_path_factory, "dspark", "agreeing", enable_confidence_head=False
    )


@pytest.fixture(scope="session")
def agreeing_mtp(tmp_path_factory):
    """Another target of SHALLOW, and an MTP layer that often agrees with it."""
    return _shallow(tmp_path_factory, "mtp", "agreeing")


@pytest.fixture(scope="session")
def random_dspark(tmp_path_factory):
    """A target of SHALLOW, and two DSpark stages that know nothing of it."""
    return _shallow(tmp_path_factory, "dspark", "tiny")


@pytest.fixture(scope="session")
def random_mtp(tmp_path_factory):
    """The same target as `random_dspark`, and an MTP layer that knows nothing of it."""
    return _shallow(tmp_path_factory, "mtp", "tiny")


def _shallow(tmp_path_factory, draft, preset, **overrides):
    from atom_vllm_bridge.checkpoint.make import make

    stages = {"n_mtp_layers": 2} if draft == "dspark" else {}
    return make(
        tmp_path_factory.mktemp("checkpoints") / f"{preset}-{draft}",
        preset=preset,
        layout="bf16",
        draft=draft,
        overrides=SHALLOW | stages | overrides,
    )
