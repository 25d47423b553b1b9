"""Drafts that vLLM itself has loaded: what they share with their target, and what real requests read back from tensors."""

import json
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import pytest
import torch
from adapters import DSPARK, MTP
from engines import SMALL, prompt, running
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import (
    get_eagle3_aux_layers_from_config,
)

from atom_vllm_bridge.attention.backend import AtomMetadataBuilder
from atom_vllm_bridge.dspark import AtomDSparkDraftModel
from atom_vllm_bridge.models.deepseek_v4.plan import Plan
from atom_vllm_bridge.models.ops import registry
from atom_vllm_bridge.mtp import AtomDeepseekV4MTP
from atom_vllm_bridge.target import AtomDeepseekV4ForCausalLM

VOCABULARY = 1024
PARTS = {
    AtomMetadataBuilder: ("build", "update_draft_decode_metadata"),
    AtomDeepseekV4ForCausalLM: ("forward", "compute_logits"),
    AtomDSparkDraftModel: (
        "combine_hidden_states",
        "precompute_and_store_context_kv",
        "forward",
        "compute_draft_logits",
        "markov_embed",
        "markov_bias",
        "map_draft_to_target",
    ),
    AtomDeepseekV4MTP: ("forward", "compute_logits"),
}


class Reads(TorchDispatchMode):
    """Notes the functions of the bridge in which a tensor's values reach Python."""

    OPERATIONS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "_unique2")
    METHODS = ("tolist", "numpy", "cpu", "__array__")

    def __init__(self):
        super().__init__()
        self.places: set[str] = set()

    def note(self):
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if "atom_vllm_bridge" in path.parts and "tests" not in path.parts:
                self.places.add(f"{path.name} {frame.f_code.co_name}")
                return
            frame = frame.f_back
        self.places.add("elsewhere")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.__name__.split(".")[0] in self.OPERATIONS:
            self.note()
        return func(*args, **(kwargs or {}))

    def watch(self, patch, calls):
        """Wrap every method of PARTS, so that what is read within it is noted."""

        def noted(read):
            def method(tensor, *args, **kwargs):
                self.note()
                return read(tensor, *args, **kwargs)

            return method

        def watched(name, function):
            def method(*args, **kwargs):
                calls[name] += 1
                with pytest.MonkeyPatch.context() as inner, self:
                    for read in self.METHODS:
                        inner.setattr(
                            torch.Tensor, read, noted(getattr(torch.Tensor, read))
                        )
                    return function(*args, **kwargs)

            return method

        for cls, names in PARTS.items():
            for name in names:
                full = f"{cls.__name__}.{name}"
                patch.setattr(cls, name, watched(full, getattr(cls, name)))


def facts_of(engine, name):
    """Serve three requests, watched; then look at the draft."""
    runner = engine.core.model_executor.driver_worker.worker.model_runner
    target, draft = runner.model, runner.speculator.model
    reads, calls = Reads(), Counter[str]()
    with pytest.MonkeyPatch.context() as patch:
        reads.watch(patch, calls)
        engine.generate([prompt(300), prompt(5, 1), prompt(70, 2)], max_tokens=8)
    ids = torch.tensor([5, -1, 9])
    hidden = torch.ones(1, SMALL["hidden_size"] * (4 if name == "mtp" else 1))
    before = draft.embed_input_ids(ids), draft.compute_logits(hidden)
    with torch.inference_mode():
        target.model.embed.mul_(2.0)
        target.model.head.mul_(2.0)
    return {
        "reads": reads.places,
        "calls": calls,
        "classes": (type(target), type(draft)),
        "before": before,
        "after": (draft.embed_input_ids(ids), draft.compute_logits(hidden)),
        "shapes": {n: tuple(p.shape) for n, p in draft.named_parameters()},
        "storages": [
            {p.untyped_storage().data_ptr() for p in model.parameters()}
            for model in (target, draft)
        ],
        "aux": target.aux_layers,
        "aux of the config": get_eagle3_aux_layers_from_config(
            runner.speculative_config
        ),
    }


@pytest.fixture(scope="module")
def engines(small_dspark, small_mtp):
    facts = {}
    for name, checkpoint, speculative in (
        ("dspark", small_dspark, DSPARK),
        ("mtp", small_mtp, MTP),
    ):
        # numba's ops read a CPU's tensors where they lie; torch's are those of any device.
        with running(
            checkpoint,
            speculative_config=speculative,
            max_model_len=1024,
            max_num_seqs=4,
            additional_config={"atom": {"ops": "torch"}},
        ) as engine:
            facts[name] = facts_of(engine, name)
    registry.configure("")
    return facts


@pytest.mark.parametrize(
    ("name", "cls"), [("dspark", AtomDSparkDraftModel), ("mtp", AtomDeepseekV4MTP)]
)
def test_embedding_and_head_are_the_targets_own(engines, name, cls):
    """What changes in the target's memory changes in the draft, which holds no second copy."""
    facts = engines[name]
    assert facts["classes"] == (AtomDeepseekV4ForCausalLM, cls)
    for before, after in zip(facts["before"], facts["after"], strict=True):
        assert before.abs().max() > 0
        assert torch.equal(2 * before, after)
    of_target, of_draft = facts["storages"]
    assert not of_target & of_draft
    shapes = [shape for n, shape in facts["shapes"].items() if "markov" not in n]
    assert not any(VOCABULARY in shape for shape in shapes)


def test_taps_are_the_layers_of_the_config_plus_one(engines, small_dspark):
    hf = json.loads((small_dspark / "config.json").read_text())
    want = tuple(layer + 1 for layer in hf["dspark_target_layer_ids"])
    assert engines["dspark"]["aux"] == engines["dspark"]["aux of the config"] == want
    assert want[-1] == hf["num_hidden_layers"]
    assert engines["mtp"]["aux"] is None


@pytest.mark.parametrize(
    ("name", "cls"), [("dspark", AtomDSparkDraftModel), ("mtp", AtomDeepseekV4MTP)]
)
def test_requests_read_nothing_back_but_what_a_cpu_may(engines, name, cls):
    """Whether a compressor has anything to pool is asked of a CPU alone, where asking stalls nothing."""
    calls = engines[name]["calls"]
    for part in (AtomMetadataBuilder, AtomDeepseekV4ForCausalLM, cls):
        for method in PARTS[part]:
            if method != "update_draft_decode_metadata":
                assert calls[f"{part.__name__}.{method}"] > 0, method
    assert engines[name]["reads"] == {f"plan.py {Plan._pool.__name__}"}
