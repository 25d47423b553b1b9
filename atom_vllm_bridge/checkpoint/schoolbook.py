"""The trained checkpoint that comes with the package, and the values in it.

Its folder is a checkpoint that can be served as it is: fp8 and mxfp4, with its DSpark draft. Beside it lies mtp.safetensors,
an MTP layer for the same target, under the names that a checkpoint with that draft has.
"""

import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file

from atom_vllm_bridge.models.quantization import block_fp8, mxfp4

FOLDER = Path(__file__).parent / "schoolbook"
MTP = FOLDER / "mtp.safetensors"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def source(draft: str | None) -> Callable[[str], torch.Tensor]:
    """The values of a tensor by its name, as they are stored: float32, int64 for a routing table.

    Args:
        draft: "dspark" or "mtp", whose tensors `mtp.*` are; None: there are none.
    """

    tensors = _stored(*sorted(FOLDER.glob("model-*")))
    if draft == "mtp":
        tensors = tensors | _stored(MTP)
    return reader(tensors)


def reader(tensors: Mapping[str, torch.Tensor]) -> Callable[[str], torch.Tensor]:
    """The same of any stored tensors: a weight with its scale beside it is dequantised.

    The function raises KeyError for a name that is not there.
    """

    def read(name: str) -> torch.Tensor:
        tensor = tensors[name]
        scale = tensors.get(name.removesuffix(".weight") + ".scale")
        if scale is not None:
            packed = tensor.dtype == torch.int8
            return (mxfp4 if packed else block_fp8).dequantize(tensor, scale)
        return tensor.float() if tensor.is_floating_point() else tensor

    return read


def copy_tokenizer(out: Path) -> None:
    """Copy the tokenizer's files into a directory."""
    for name in _TOKENIZER:
        shutil.copyfile(FOLDER / name, out / name)


@cache
def _stored(*files: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors.update(load_file(file))
    return tensors
