"""A step on a device never waits for the host: no value crosses over, in either direction, so that it can be captured.

Builders, target and drafts run on a device of torch's that holds no values ("meta"): what depends on a value raises of
itself, and every operation that takes from one device and gives to another is refused.
"""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from adapters import (
    DSPARK,
    MTP,
    DraftRun,
    TargetRun,
    build,
    configuration,
    during,
    share,
)
from engines import SMALL
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from atom_vllm_bridge.checkpoint.make import make
from atom_vllm_bridge.dspark import AtomDSparkDraftModel
from atom_vllm_bridge.models.ops import registry
from atom_vllm_bridge.mtp import AtomDeepseekV4MTP
from atom_vllm_bridge.target import AtomDeepseekV4ForCausalLM

# A prefill beside a short one; verification of five drafts on both sides of a group of 128; one token each.
STEPS = ([(0, 0, 250), (1, 0, 3)], [(0, 250, 6), (1, 3, 6)], [(0, 256, 1), (1, 9, 1)])


class Crossing(AssertionError):
    pass


class NothingCrosses(TorchDispatchMode):
    """Raises at the first operation whose tensors lie on more than one device. Numbers that the host sends along are none."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)]
        made = [t for t in tree_leaves(out) if torch.is_tensor(t)]
        devices = {t.device.type for t in given if t.dim()}
        devices |= {t.device.type for t in made}
        if len(devices) > 1:
            raise Crossing(f"{func} between {' and '.join(sorted(devices))}")
        return out


@pytest.fixture(scope="module", autouse=True)
def default_ops_afterwards():
    yield
    registry.configure("")


def refuse(*_, **__):
    raise Crossing("a tensor is made of the host's values")


@contextmanager
def guarded():
    with pytest.MonkeyPatch.context() as patch:
        for maker in ("tensor", "as_tensor", "from_numpy"):
            patch.setattr(torch, maker, refuse)
        with NothingCrosses(), torch.inference_mode():
            yield


def on_device(cls, checkpoint, speculative):
    config = configuration(checkpoint, speculative, "bfloat16")
    return build(cls, config, device="meta")


def empty(*shape, dtype=torch.int64):
    return torch.zeros(*shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    "crossing",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.to("cpu", non_blocking=True),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.unique(),
        lambda x: x + torch.arange(4, device="cpu").to("meta"),
        lambda x: x.copy_(torch.arange(4, device="cpu")),
        lambda x: x + torch.tensor([1, 2, 3, 4], device="meta"),
        lambda x: torch.arange(4, device="cpu")[x],
        lambda x: x + torch.from_numpy(np.arange(4)),
    ],
)
def test_what_crosses_is_noticed(crossing):
    x = empty(4)
    with pytest.raises((Crossing, RuntimeError)), guarded():
        crossing(x)


def test_what_stays_is_let_pass():
    x = empty(4)
    with guarded():
        y = torch.where(x > 0, x * 2.5, torch.arange(4, device="meta")).cumsum(0)
        assert y.clamp(min=0).device.type == "meta"


@pytest.mark.parametrize("taps", [None, (1, 4, 6)])
def test_the_target_reads_nothing_back(small_dspark, taps):
    target = on_device(AtomDeepseekV4ForCausalLM, small_dspark, DSPARK)
    if taps:
        target.set_aux_hidden_state_layers(taps)
    run = TargetRun(target)
    for chunks in STEPS:
        tokens = sum(count for *_, count in chunks)
        ids = empty(tokens, dtype=torch.int32)
        positions, metadata = run.prepare(chunks)
        with during(metadata), guarded():
            out = target(input_ids=ids, positions=positions)
            hidden = out[0] if taps else out
            logits = target.compute_logits(hidden)
        assert logits.shape == (tokens, 1024)
        assert logits.device.type == "meta"
        if taps:
            assert [tap.shape for tap in out[1]] == [(tokens, 128)] * 3


def test_the_targets_streams_for_an_mtp_draft_stay(small_mtp):
    target = on_device(AtomDeepseekV4ForCausalLM, small_mtp, MTP)
    positions, metadata = TargetRun(target).prepare(STEPS[0])
    with during(metadata), guarded():
        target(input_ids=empty(253), positions=positions)
        assert target.get_mtp_target_hidden_states().device.type == "meta"


@pytest.mark.parametrize("k", [1, 5, 8])
def test_a_dspark_draft_reads_nothing_back(small_dspark, k):
    """Context, block, Markov head and confidence: all of `propose`."""
    target = on_device(AtomDeepseekV4ForCausalLM, small_dspark, DSPARK)
    draft = on_device(AtomDSparkDraftModel, small_dspark, DSPARK)
    share(draft, target)
    run = DraftRun(draft, draft.windows)
    for chunks in STEPS:
        tokens = sum(count for *_, count in chunks)
        positions, _ = run.prepare(chunks)
        slots = run.slots(chunks)
        taps = empty(tokens, 3 * 128, dtype=torch.bfloat16)
        with guarded():
            states = draft.combine_hidden_states(taps)
            for given in (slots, [slots[:tokens] for _ in range(3)], None):
                draft.precompute_and_store_context_kv(states, positions, given)
        blocks = [(r, start + count, k) for r, start, count in chunks]
        positions, metadata = run.prepare(blocks)
        ids = empty(2 * k, dtype=torch.int32)
        with during(metadata), guarded():
            hidden = draft(input_ids=ids, positions=positions, inputs_embeds=None)
            base = draft.compute_draft_logits(hidden)
            assert base.shape == (2 * k, 1024)
            previous = ids[::k]
            for step in range(k):
                embedded = draft.markov_embed(previous)
                logits = base.view(2, k, -1)[:, step] + draft.markov_bias(embedded)
                previous = draft.map_draft_to_target(logits.argmax(-1))
            chance = draft.compute_confidence(hidden[::k], embedded)
        assert previous.device.type == chance.device.type == "meta"


def test_an_mtp_draft_reads_nothing_back(small_mtp):
    target = on_device(AtomDeepseekV4ForCausalLM, small_mtp, MTP)
    draft = on_device(AtomDeepseekV4MTP, small_mtp, MTP)
    share(draft, target)
    run = DraftRun(draft, [draft.window])
    for chunks in STEPS:
        tokens = sum(count for *_, count in chunks)
        positions, metadata = run.prepare(chunks)
        streams = empty(tokens, 4 * 128, dtype=torch.bfloat16)
        with during(metadata), guarded():
            out = draft(empty(tokens, dtype=torch.int32), positions, streams)
            logits = draft.compute_logits(out)
        assert out.shape == (tokens, 4 * 128)
        assert logits.shape == (tokens, 1024)
        assert logits.device.type == "meta"


def test_profiling_runs_read_nothing_back(small_dspark):
    """Without metadata: requests over null blocks."""
    target = on_device(AtomDeepseekV4ForCausalLM, small_dspark, DSPARK)
    draft = on_device(AtomDSparkDraftModel, small_dspark, DSPARK)
    share(draft, target)
    with during(None), guarded():
        target(input_ids=empty(40), positions=empty(40))
        hidden = draft(input_ids=empty(40), positions=empty(40))
        assert hidden.shape == (40, 128)


@pytest.fixture(scope="module")
def shallow(tmp_path_factory):
    """One layer of each kind and few steps of Sinkhorn, since tracing takes its time for every operation."""
    return make(
        tmp_path_factory.mktemp("checkpoints") / "shallow",
        layout="bf16",
        overrides=SMALL | {"num_hidden_layers": 3, "hc_sinkhorn_iters": 2},
    )


@pytest.mark.parametrize("taps", [None, (1, 3)])
def test_a_graph_of_the_target_has_its_taps_built_in(shallow, taps):
    """What was traced gives as many outputs as there were taps, whatever is chosen later; so nothing may be chosen later."""
    target = on_device(AtomDeepseekV4ForCausalLM, shallow, DSPARK)
    if taps:
        target.set_aux_hidden_state_layers(taps)
    positions, metadata = TargetRun(target).prepare(STEPS[1])

    def step(ids, positions):
        out = target(input_ids=ids, positions=positions)
        return [out[0], *out[1]] if taps else [out]

    with during(metadata), torch.no_grad():
        graph = make_fx(step, tracing_mode="real")(empty(12), positions)
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    results = tree_leaves(output.args)
    assert len(results) == 1 + len(taps or ())
    reads = {"_local_scalar_dense", "nonzero", "item"}
    names = {
        str(node.target).split(".")[1]
        for node in graph.graph.nodes
        if "aten" in str(node.target)
    }
    assert len(names) > 20
    assert not names & reads
    if taps:
        for other in ((1,), (1, 2), (1, 2, 3)):
            with pytest.raises(RuntimeError, match="cannot become"):
                target.set_aux_hidden_state_layers(other)
        target.set_aux_hidden_state_layers(taps)


def test_a_graph_of_a_dspark_draft_holds_context_and_block(shallow):
    """As vLLM captures them: in one graph, the slots of the context an input."""
    target = on_device(AtomDeepseekV4ForCausalLM, shallow, DSPARK)
    draft = on_device(AtomDSparkDraftModel, shallow, DSPARK)
    share(draft, target)
    run = DraftRun(draft, draft.windows)
    positions, metadata = run.prepare([(0, 12, 5), (1, 3, 5)])

    def step(states, context_positions, slots, ids, positions):
        draft.precompute_and_store_context_kv(states, context_positions, slots)
        hidden = draft(input_ids=ids, positions=positions)
        return draft.compute_draft_logits(hidden)

    states = empty(12, 128, dtype=torch.bfloat16)
    with during(metadata), torch.no_grad():
        graph = make_fx(step, tracing_mode="real")(
            states, empty(12), empty(12), empty(10), positions
        )
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    assert all(node.users for node in inputs)
    writes = [n for n in graph.graph.nodes if "index_copy" in str(n.target)]
    # Each of three stages writes its context and its block.
    assert len([n for n in writes if "index_copy_" in str(n.target)]) >= 6
