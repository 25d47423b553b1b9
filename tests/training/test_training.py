"""What surrounds the forward: batches, rates, saved weights, and what is told about a draft."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from atom_vllm_bridge.checkpoint.schoolbook import FOLDER, reader
from atom_vllm_bridge.models.deepseek_v4.checkpoint import check_headers, tensor_table
from atom_vllm_bridge.models.deepseek_v4.shards import check_shards
from training import corpus, losses, model, publish, report
from training.corpus import ANSWER, PROMPT, PROSE
from training.phases import PHASES, Phase, run
from training.stream import batches
from training.weights import published


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return publish.tokenizer(tmp_path_factory.mktemp("tokenizer")).parent


def test_training_needs_no_engine():
    code = "import sys, training.__main__; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    roots = {name.partition(".")[0] for name in done.stdout.split()}
    assert "vllm" not in roots
    assert "torch" in roots


def test_batches_are_the_rows_of_the_corpus_in_order(tokenizer):
    made = list(batches(tokenizer, 3, 2, 2, "cpu", 1))
    rows = corpus.rows(tokenizer, 3, 4)
    assert torch.cat([batch.ids for batch in made]).tolist() == rows.tokens.tolist()
    assert torch.cat([batch.kinds for batch in made]).tolist() == rows.kinds.tolist()
    assert {PROMPT, ANSWER, PROSE} == set(rows.kinds.flatten().tolist())


def test_a_rate_rises_stays_and_falls():
    phase = Phase("p", "target", 100, 1, 1.0, last_rate=0.1, falling=0.5)
    rates = [phase.rate_at(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.25)
    assert rates[3:51] == [1.0] * 48
    assert rates[75] == pytest.approx(0.1 + 0.9 * 0.5)
    assert rates[99] == pytest.approx(0.1 + 0.9 * 0.02)
    assert all(phase.last_rate <= 1 for phase in PHASES)


def test_saved_weights_are_the_checkpoints_tensors(tmp_path):
    for part, phase in model.FINISHED.items():
        weights = model.new(part, 1, "cpu")
        model.save(weights, phase, tmp_path)
        again = model.restore(part, 2, "cpu", tmp_path)
        assert all(
            torch.equal(leaf, again.leaves[name])
            for name, leaf in weights.leaves.items()
        )
    saved = {
        part: dict(published(load_file(tmp_path / f"{phase}.safetensors")))
        for part, phase in model.FINISHED.items()
    }
    for draft in ("dspark", "mtp"):
        table = tensor_table(model.config_of(draft), "bf16")
        both = saved["target"] | saved[draft]
        assert {name: tuple(value.shape) for name, value in both.items()} == {
            name: spec.shape for name, spec in table.items()
        }


def test_what_a_phase_trained_is_published_as_it_was_computed(tokenizer, tmp_path):
    shutil.copytree(tokenizer, tmp_path / "tokenizer")
    model.save(model.new("target", 1, "cpu"), "target-2", tmp_path)
    digest = model.digest("target-2", tmp_path)
    model.save(model.new("mtp", 1, "cpu"), "mtp", tmp_path, digest)
    run(Phase("dspark", "dspark", 1, 1, 1e-2), tmp_path, 1, "cpu", 1, compiled=False)
    (told,) = map(json.loads, (tmp_path / "dspark.jsonl").read_text().splitlines())
    assert told["step"] == 1
    assert told["divergence"] > 0
    before = model.new("dspark", 1, "cpu")
    after = model.restore("dspark", 1, "cpu", tmp_path)
    assert all(
        not torch.equal(leaf, after.leaves[name])
        for name, leaf in before.leaves.items()
        if name.endswith(("experts.w1", "wq_a.weight", "proj.weight", "gate.bias"))
    )
    folder = publish.checkpoint(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    check_headers(tensor_table(config, "mxfp4"), check_shards(folder))
    stored = reader(load_file(next(folder.glob("model-*"))))
    target = model.restore("target", 1, "cpu", tmp_path)
    for weights in (target, after):
        for name, value in published(model.frozen(weights)):
            assert torch.equal(stored(name), value), name
    assert (folder / "tokenizer.json").exists()


def test_what_a_phase_builds_on_must_be_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="run the phase target-2 first"):
        model.restore("target", 0, "cpu", tmp_path)


def test_a_draft_of_another_target_is_not_published(tokenizer, tmp_path):
    shutil.copytree(tokenizer, tmp_path / "tokenizer")
    model.save(model.new("target", 1, "cpu"), "target-2", tmp_path)
    digest = model.digest("target-2", tmp_path)
    model.save(model.new("dspark", 1, "cpu"), "dspark", tmp_path, digest)
    model.save(model.new("mtp", 1, "cpu"), "mtp", tmp_path, "of another")
    with pytest.raises(ValueError, match="run --phases mtp again"):
        publish.checkpoint(tmp_path)


def test_a_head_that_tells_the_truth_is_calibrated():
    told = torch.tensor([[0.25, 0.95], [0.25, 0.95], [0.25, 0.95], [0.25, 0.95]])
    happened = torch.tensor([[1, 0], [0, 1], [0, 1], [0, 1]])
    error = losses.calibration(told, happened)
    assert error.tolist() == pytest.approx([0.0, 0.2], abs=1e-6)


def test_confidence_is_taught_the_chance_of_acceptance():
    accepted = torch.tensor([[[1.0, 0.5]]])
    told = torch.zeros(1, 1, 2, requires_grad=True)
    drafts = losses.Drafts(torch.zeros(1, 1, 2), accepted, accepted > 0.9, told)
    loss, figures = losses.dspark_loss(drafts)
    loss.backward()
    # σ(0) = ½: the first is to rise, the second is right.
    assert told.grad[0, 0, 0] < 0
    assert told.grad[0, 0, 1].abs() < 1e-7
    assert float(figures["accepted at T=1"]) == pytest.approx(1 + 1 + 0.5)
    assert float(figures["accepted greedily"]) == pytest.approx(1 + 1 + 0)


def test_the_shipped_draft_is_accepted_and_knows_when():
    figures = report.drafts(FOLDER, 5, 2, "cpu")
    for kind, least in (("answer", 0.9), ("prose", 0.8)):
        accepted = figures[kind]["accepted at temperature 1"]
        assert len(accepted) == 5
        assert min(accepted) > least
        assert max(figures[kind]["calibration error"]) <= 0.05
