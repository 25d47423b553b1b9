"""Write what was trained as it is published."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from atom_vllm_bridge.checkpoint import make
from training import corpus, model
from training.weights import published


def tokenizer(out: Path) -> Path:
    """Write the tokenizer unless it is there; returns its tokenizer.json."""
    file = out / "tokenizer.json"
    if not file.exists():
        out.mkdir(parents=True, exist_ok=True)
        corpus.write_corpus_tokenizer(
            out, model.config_of("target")["max_position_embeddings"]
        )
    return file


def checkpoint(out: Path) -> Path:
    """Write OUT/schoolbook, in the layout of atom_vllm_bridge/checkpoint/schoolbook.

    Raises:
        FileNotFoundError: a part has not been trained.
        ValueError: a draft was trained for another target than the one that is there.
    """
    folder = out / "schoolbook"
    target = model.digest(model.FINISHED["target"], out)
    for part in ("dspark", "mtp"):
        if model.target_of(model.FINISHED[part], out) != target:
            raise ValueError(
                f"{out}: {part} was trained for another target than the one saved there; run --phases {part} again."
            )
    for part, where in (("dspark", folder), ("mtp", out / "with-mtp")):
        shutil.rmtree(where, ignore_errors=True)
        where.mkdir()
        phases = (model.FINISHED["target"], model.FINISHED[part])
        leaves = {
            name: leaf
            for phase in phases
            for name, leaf in model.saved(phase, out).items()
        }
        values = dict(published(leaves))
        make.write(where, model.config_of(part), values.__getitem__, "mxfp4")
    for file in (out / "tokenizer").iterdir():
        shutil.copyfile(file, folder / file.name)
    tensors: dict[str, torch.Tensor] = {}
    for shard in (out / "with-mtp").glob("model-*"):
        tensors |= load_file(shard)
    draft = {name: t for name, t in tensors.items() if name.startswith("mtp.")}
    save_file(draft, folder / "mtp.safetensors", metadata={"format": "pt"})
    shutil.rmtree(out / "with-mtp")
    return folder
