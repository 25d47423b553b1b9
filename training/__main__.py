"""Train the `schoolbook` checkpoint: `python -m training OUT`, on one GPU."""

import json
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from tokenizers import Tokenizer

from training import answers, curves, model, publish
from training.phases import PHASES, run

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def train(
    out: Annotated[Path, typer.Argument(help="Where weights, logs and pictures go.")],
    seed: Annotated[int, typer.Option(help="Of weights and text.")] = 0,
    phases: Annotated[
        str, typer.Option(help="Phases to run; each starts from saved weights.")
    ] = ",".join(phase.name for phase in PHASES),
    device: Annotated[str, typer.Option()] = "cuda",
    workers: Annotated[int, typer.Option(help="Processes that make text.")] = 4,
) -> None:
    """Run phases one after another, and write the checkpoint once its last one is done."""
    known = {phase.name: phase for phase in PHASES}
    asked = phases.split(",")
    if unknown := [name for name in asked if name not in known]:
        raise typer.BadParameter(
            f"no phase {unknown[0]!r}: choose from {', '.join(known)}"
        )
    torch.set_float32_matmul_precision("high")
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = publish.tokenizer(out / "tokenizer")
    for name in asked:
        phase, started = known[name], time.monotonic()
        run(phase, out, seed, device, workers, compiled=device != "cpu")
        curves.draw(out / f"{name}.jsonl")
        told = {"phase": name, "seconds": round(time.monotonic() - started)}
        if phase.part == "target":
            weights = model.restore("target", seed, device, out, name)
            view, text = model.frozen(weights), Tokenizer.from_file(str(tokenizer))
            told["0-shot"] = answers.exact_match(view, text, 0, 256, device)
            told["8-shot"] = answers.exact_match(view, text, 8, 64, device)
        print(json.dumps(told), flush=True)
    if all((out / f"{name}.safetensors").exists() for name in model.FINISHED.values()):
        publish.checkpoint(out)


if __name__ == "__main__":
    app()
