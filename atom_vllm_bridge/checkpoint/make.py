"""Write a checkpoint as it would be published: shards, index, config, tokenizer.

The bf16 layout of a seed holds exactly the values that a quantised layout of the same seed
dequantises to, so one reference run serves them all.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from atom_vllm_bridge.checkpoint import agreeing, schoolbook
from atom_vllm_bridge.checkpoint.presets import build_config
from atom_vllm_bridge.checkpoint.tokenizer import write_tokenizer
from atom_vllm_bridge.checkpoint.weights import GAINS, draw
from atom_vllm_bridge.models.deepseek_v4.checkpoint import (
    LAYOUTS,
    Layout,
    TensorSpec,
    draft_kind,
    tensor_table,
)
from atom_vllm_bridge.models.quantization import block_fp8, mxfp4

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 1 << 30

Source = Callable[[str], torch.Tensor]
"""Unquantised values by name: float32, int64 for a routing table."""


def make(
    out: str | Path,
    preset: str = "tiny",
    layout: str = "mxfp4",
    layers: int | None = None,
    seed: int = 0,
    draft: str | None = "dspark",
    overrides: dict[str, Any] | None = None,
    *,
    like: str | None = None,
    wo_a: str | None = None,
    gains: Mapping[str, float] | None = None,
    tokenizer: bool = True,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    progress: bool = False,
) -> Path:
    """Generate a checkpoint.

    Args:
        out: directory to write; config.json comes last, so its presence means complete.
        preset: "tiny", "agreeing" (tiny, with a draft that is often accepted),
            "schoolbook" (trained, not random) or "flash-shaped".
        layout: "bf16", "mxfp4" (Flash, Pro) or "fp8" (Flash-Base).
        layers: depth of the target; the preset's by default.
        seed: same seed, same values, in every layout and on every machine (but for the
            last bits of the Markov head of "agreeing").
        draft: "dspark", "mtp" or "none".
        overrides: config keys, such as {"head_dim": 64, "index_topk": 16}.
        like: with layout "bf16", the quantised layout whose values it holds ("mxfp4").
        wo_a: "bf16" stores wo_a unquantised, as one published fp8 checkpoint does.
        gains: factors on matrices by the end of their names (see `weights.draw`).
        tokenizer: False leaves it out (a vocabulary too small to hold the bytes).
        shard_bytes: shards are filled up to here; also bounds the memory needed.
        overwrite: replace a checkpoint that is there.
        progress: show a bar.

    Returns:
        `out` as a Path.

    Raises:
        ValueError: a value that is not on offer, or dimensions that do not fit together.
        FileExistsError: `out` holds something and overwrite is False.
    """
    # Before anything is removed to make room.
    _layouts(layout, like, wo_a)
    config = build_config(
        preset, layout=layout, layers=layers, draft=draft, overrides=overrides
    )
    if preset == "schoolbook":
        if layers is not None or seed or overrides or gains:
            raise ValueError(
                "preset 'schoolbook' is trained: layers, seed, overrides and gains do not go with it"
            )
        source = schoolbook.source(draft_kind(config))
    else:
        source = _random(config, {**GAINS, **(gains or {})}, seed)
    out = Path(out)
    _prepare(out, overwrite)
    if tokenizer and preset == "schoolbook":
        schoolbook.copy_tokenizer(out)
    elif tokenizer:
        write_tokenizer(out, config["vocab_size"], config["max_position_embeddings"])
    write(
        out,
        config,
        source,
        layout,
        like=like,
        wo_a=wo_a,
        agrees=preset == "agreeing",
        shard_bytes=shard_bytes,
        progress=progress,
    )
    return out


def write(
    out: Path,
    config: dict[str, Any],
    source: Source,
    layout: str,
    *,
    like: str | None = None,
    wo_a: str | None = None,
    agrees: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: bool = False,
) -> None:
    """Write shards, index, generation_config.json and config.json.

    Args:
        out: an existing directory.
        config: the content of config.json.
        source: the unquantised values of a tensor, by its name.
        layout, like, wo_a, shard_bytes, progress: as in `make`.
        agrees: the values are shaped as agreeing.py says.

    Raises:
        KeyError: `source` lacks a tensor of the config.
        ValueError: a layout that is not on offer.
    """
    target, reference = _layouts(layout, like, wo_a)
    _Writer(config, target, reference, source, agrees).write(out, shard_bytes, progress)
    _write_json(
        out / "generation_config.json",
        {
            "_from_model_config": True,
            "bos_token_id": config["bos_token_id"],
            "eos_token_id": config["eos_token_id"],
            "do_sample": True,
            "temperature": 1.0,
            "top_p": 1.0,
        },
    )
    _write_json(out / "config.json", config)


def _random(config: dict[str, Any], gains: Mapping[str, float], seed: int) -> Source:
    shapes = {name: spec.shape for name, spec in tensor_table(config, "bf16").items()}
    return lambda name: draw(name, shapes[name], config, gains, seed)


class _Writer:
    """Draws, quantises and writes, one shard in memory at a time."""

    def __init__(
        self,
        config: dict[str, Any],
        target: Layout,
        reference: Layout,
        source: Source,
        agrees: bool,
    ):
        self.config = config
        self.source = source
        self.logical = tensor_table(config, "bf16")
        self.target = tensor_table(config, target)
        self.reference = tensor_table(config, reference)
        self.agrees = agrees
        self.markov_w2: torch.Tensor | None = None

    def write(self, out: Path, shard_bytes: int, progress: bool) -> None:
        shards = list(self.plan(shard_bytes))
        weight_map: dict[str, str] = {}
        bar = tqdm(
            total=len(self.logical), desc="tensors", unit="", disable=not progress
        )
        # Many small operations: one thread a tensor beats many threads an operation.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            if self.agrees and draft_kind(self.config) == "dspark":
                self.markov_w2 = agreeing.learn_markov_w2(self.config, self.read)
            with bar, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                for number, names in enumerate(shards, 1):
                    shard = f"model-{number:05}-of-{len(shards):05}.safetensors"
                    tensors: dict[str, torch.Tensor] = {}
                    for stored in pool.map(self.store, names):
                        tensors.update(stored)
                        bar.update()
                    save_file(tensors, out / shard, metadata={"format": "pt"})
                    (out / shard).chmod(0o644)
                    weight_map.update(dict.fromkeys(tensors, shard))
        finally:
            torch.set_num_threads(threads)
        total = sum(spec.nbytes for spec in self.target.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(out / INDEX, index)

    def plan(self, shard_bytes: int) -> Iterator[list[str]]:
        """Logical names a shard; a weight and its scale stay together."""
        names: list[str] = []
        size = 0
        for name in self.logical:
            nbytes = self.target[name].nbytes
            if scale := self.target.get(_scale_name(name)):
                nbytes += scale.nbytes
            if names and size + nbytes > shard_bytes:
                yield names
                names, size = [], 0
            names.append(name)
            size += nbytes
        yield names

    def store(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors on disk that hold one logical tensor."""
        scale = _scale_name(name)
        if scale not in self.target:
            return {name: self.read(name)}
        weight, weight_scale = _quantize(self.values(name), self.reference, name)
        return {name: weight, scale: weight_scale}

    def read(self, name: str) -> torch.Tensor:
        """One logical tensor as the target holds it where it does not quantise it."""
        values = self.values(name)
        if _scale_name(name) in self.reference:
            weight, scale = _quantize(values, self.reference, name)
            packed = weight.dtype == torch.int8
            values = (mxfp4 if packed else block_fp8).dequantize(weight, scale)
        return values.to(_TORCH[self.logical[name].dtype]).contiguous()

    def values(self, name: str) -> torch.Tensor:
        """The unquantised values of one logical tensor."""
        if not self.agrees:
            return self.source(name)
        if self.markov_w2 is not None and name.endswith("markov_w2.weight"):
            return self.markov_w2
        return agreeing.shape(name, self.source, self.config)


_TORCH = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I64": torch.int64,
    "F8_E8M0": torch.float8_e8m0fnu,
}


def _quantize(
    values: torch.Tensor, table: Mapping[str, TensorSpec], name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    if table[name].dtype == "I8":
        return mxfp4.quantize(values)
    return block_fp8.quantize(values, _TORCH[table[_scale_name(name)].dtype])


def _scale_name(name: str) -> str:
    return name.removesuffix(".weight") + ".scale"


def _layouts(name: str, like: str | None, wo_a: str | None) -> tuple[Layout, Layout]:
    """The layout to write, and the one whose values it holds."""
    target = _layout(name, wo_a)
    if like is not None and name != "bf16":
        raise ValueError(f"like={like!r} is for layout 'bf16', not {name!r}")
    return target, _layout(like or "mxfp4", None) if name == "bf16" else LAYOUTS[name]


def _layout(name: str, wo_a: str | None) -> Layout:
    if name not in LAYOUTS:
        raise ValueError(f"no layout {name!r}: choose one of {', '.join(LAYOUTS)}")
    if wo_a not in (None, "bf16", "fp8"):
        raise ValueError(f"no wo_a {wo_a!r}: choose bf16 or fp8")
    if wo_a == "fp8" and name == "bf16":
        raise ValueError("wo_a='fp8' does not go with layout 'bf16'")
    layout = LAYOUTS[name]
    return replace(layout, wo_a="BF16") if wo_a == "bf16" else layout


def _prepare(out: Path, overwrite: bool) -> None:
    if out.exists() and any(out.iterdir()):
        if not overwrite:
            raise FileExistsError(
                f"{out} is not empty: choose another directory, or pass --overwrite"
            )
        for stale in ["config.json", INDEX, *(p.name for p in out.glob("model-*"))]:
            (out / stale).unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(
        json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
