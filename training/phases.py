"""The phases of training: each starts from saved weights alone, takes minutes, and saves weights."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from atom_vllm_bridge.models.deepseek_v4.checkpoint import draft_stages
from training import losses, model
from training.corpus import INPUTS, PROMPT
from training.dense import Dense
from training.layer import Trace
from training.losses import Target
from training.stream import Rows, batches
from training.weights import Weights

BLOCKS = (5, 5, 7)
"""Tokens of DSpark's blocks in turn: mostly the published number."""

DRAFTED = 490
"""Tokens of all blocks in a row, whatever their length."""

BALANCE = 2e-3
"""Step of a gate's bias against an uneven load (auxiliary-loss-free balancing; DeepSeek-V3 report, section 2.1.2)."""


@dataclass(frozen=True)
class Phase:
    """One run.

    Attributes:
        name: also names its files: weights, figures and curves.
        part: what it trains, a key of model.PARTS.
        steps, batch: how long, and rows a step.
        rate: highest learning rate; it rises over the first 4 % of the steps.
        last_rate: at the end, as a fraction of `rate`; it falls linearly over the last `falling` of the steps.
        rounded: compute with the values that the checkpoint can store.
        start: the phase from whose weights it starts; None: from new ones.
    """

    name: str
    part: str
    steps: int
    batch: int
    rate: float
    last_rate: float = 0.02
    falling: float = 1.0
    rounded: bool = True
    start: str | None = None

    def rate_at(self, step: int) -> float:
        rise = min(1.0, (step + 1) / max(1, self.steps * 0.04))
        left = (self.steps - step) / max(1, self.steps * self.falling)
        fall = self.last_rate + (1 - self.last_rate) * min(1.0, left)
        return self.rate * rise * fall


PHASES = (
    Phase("target-1", "target", 1500, 32, 2.5e-3, 1.0, rounded=False),
    Phase("target-2", "target", 1600, 32, 2e-3, start="target-1"),
    Phase("dspark", "dspark", 1800, 32, 2e-3),
    Phase("mtp", "mtp", 500, 32, 2e-3),
)

Step = Callable[
    [dict[str, torch.Tensor], Rows, int, Trace],
    tuple[torch.Tensor, dict[str, torch.Tensor]],
]


def run(
    phase: Phase, out: Path, seed: int, device: str, workers: int, compiled: bool
) -> None:
    """Train, and save the weights and a log of the figures, one JSON object a line.

    Raises:
        FileNotFoundError: weights that the phase builds on are missing.
        FloatingPointError: the loss is not a number.
    """
    if phase.start:
        weights = model.restore(phase.part, seed, device, out, phase.start)
    else:
        weights = model.new(phase.part, seed, device)
    target = ""
    if phase.part != "target":
        target = model.digest(model.FINISHED["target"], out)
    dense = Dense(model.dimensions(), INPUTS, device)
    if compiled:
        dense.compile()
    step_of = _step(phase, out, seed, device, dense)
    optimizer = _optimizer(weights, phase.rate, device)
    stream = batches(
        out / "tokenizer",
        # Far from the seeds of the other phases.
        (seed * 16 + PHASES.index(phase) if phase in PHASES else seed) << 32,
        phase.batch,
        phase.steps,
        device,
        workers,
    )
    with (
        (out / f"{phase.name}.jsonl").open("w") as log,
        tqdm(stream, phase.name, phase.steps, unit="step", mininterval=5) as bar,
    ):
        for number, rows in enumerate(bar):
            for group in optimizer.param_groups:
                group["lr"] = phase.rate_at(number)
            trace = Trace()
            with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
                view = weights.view(rounded=phase.rounded)
                loss, figures = step_of(view, rows, number, trace)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights.trained(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            _balance(weights, trace)
            # A multiple of the lengths of DSpark's blocks apart, so that all points are of one length.
            if number % 21 == 19 or number + 1 == phase.steps:
                told = {
                    name: round(float(v.detach()), 4) for name, v in figures.items()
                }
                if not torch.isfinite(loss):
                    raise FloatingPointError(
                        f"{phase.name}: the loss is {float(loss)} at step {number}; lower the phase's rate"
                    )
                log.write(json.dumps({"step": number + 1, **told}) + "\n")
                bar.set_postfix(told, refresh=False)
    model.save(weights, phase.name, out, target)


def _step(phase: Phase, out: Path, seed: int, device: str, dense: Dense) -> Step:
    """What one step of the phase computes."""
    if phase.part == "target":

        def target_step(view, rows, number, trace):
            # An indexer that knows nothing yet would hide what attention is to learn from.
            trace.select = phase.rounded or number > phase.steps // 2
            return losses.target_loss(dense, view, rows.ids, rows.kinds, trace)

        return target_step

    hf = model.config_of(phase.part)
    trained = model.frozen(model.restore("target", seed, device, out))
    target = Target(trained, tuple(hf.get("dspark_target_layer_ids", ())))
    if phase.part == "mtp":
        return lambda view, rows, number, trace: losses.mtp_loss(
            dense, view, target, rows.ids, rows.kinds
        )

    generator = torch.Generator(device).manual_seed(seed)
    stages, noise = draft_stages(hf), hf["dspark_noise_token_id"]

    def dspark_step(view, rows, number, trace):
        size = BLOCKS[number % len(BLOCKS)]
        ids = rows.ids[:, :-1]
        # Blocks stand where a server drafts: the token after the first is an answer's or prose's.
        wanted = (rows.kinds[:, 1:] != PROMPT).float() + 1e-3
        wanted[:, INPUTS - size :] = 0.0
        anchors = wanted.multinomial(DRAFTED // size, generator=generator)
        return losses.dspark_loss(
            losses.draft_blocks(
                dense, view, stages, noise, target, ids, anchors, size, trace
            )
        )

    return dspark_step


def _optimizer(weights: Weights, rate: float, device: str) -> torch.optim.AdamW:
    trained = weights.trained()
    matrices = [leaf for leaf in trained if leaf.dim() > 1]
    others = [leaf for leaf in trained if leaf.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=rate, betas=(0.9, 0.95), eps=1e-10, fused=device != "cpu"
    )


@torch.no_grad()
def _balance(weights: Weights, trace: Trace) -> None:
    for name, load in trace.loads.items():
        bias = weights.leaves[name]
        bias += BALANCE * (load.mean() - load).sign()
        bias -= bias.mean()
