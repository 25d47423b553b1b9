"""`--load-format dummy`: random weights in the layout of config.json, to time a model whose checkpoint is not there.

vLLM's loader of that format fills the parameters that it finds and calls no `load_weights`. Here a matrix has no memory
before its first tensor tells its format, and a routing table of noise names experts that do not exist; so the adapters
load the tensors that a checkpoint of this config would hold, by the way of every other checkpoint.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from atom_vllm_bridge.checkpoint.weights import GAINS, draw, gain_of
from atom_vllm_bridge.models.deepseek_v4.checkpoint import TensorSpec, tensor_table

# Standard deviation of a code drawn at random: the eight magnitudes of e2m1, and of e4m3 those from 1 to 2.
_DEVIATION = {"I8": 2.93, "F8_E4M3": 1.46}


def asked(vllm_config: VllmConfig) -> bool:
    """Whether the model of this configuration is to be filled so; a draft's configuration holds the draft's own choice."""
    return vllm_config.load_config.load_format == "dummy"


def table(config: Mapping[str, Any]) -> dict[str, TensorSpec]:
    """The tensors that a checkpoint of this config.json would hold, its draft's among them.

    Raises:
        ValueError: as `tensor_table`.
    """
    layout = "bf16"
    if config.get("quantization_config"):
        layout = "mxfp4" if config.get("expert_dtype") == "fp4" else "fp8"
    return tensor_table(config, layout)


class DummyWeights(QuantizeMethodBase):
    """What vLLM calls once its dummy loader is done with a model; `None` in place of this where weights are loaded."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    @classmethod
    def of(
        cls, vllm_config: VllmConfig, config: Mapping[str, Any]
    ) -> "DummyWeights | None":
        """The adapter's `quant_method`.

        Args:
            config: the content of config.json.
        """
        return cls(config) if asked(vllm_config) else None

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        """The model makes its own."""

    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """vLLM asks it of its own layers, and every method has to have one.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "DummyWeights fills a whole model, which multiplies with its own ops: call the model."
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.load_weights(tensors(self.config))


def tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Published tensors of random values, the same ones each time, scaled so that activations keep their size.

    Args:
        config: the content of config.json.
    """
    specs = table(config)
    generator = torch.Generator().manual_seed(0)
    for name, spec in specs.items():
        if name.endswith(".scale"):
            continue
        scale = name.removesuffix(".weight") + ".scale"
        if scale not in specs:
            yield name, draw(name, spec.shape, config, GAINS, seed=0)
            continue
        packed = spec.dtype == "I8"
        codes = torch.randint(256, spec.shape, generator=generator, dtype=torch.uint8)
        if packed:
            yield name, codes.view(torch.int8)
        else:
            # Any sign and fraction, exponent 0.
            yield name, (codes & 0x87 | 7 << 3).view(torch.float8_e4m3fn)
        inputs = spec.shape[-1] * (2 if packed else 1)
        deviation = gain_of(name, GAINS) / inputs**0.5
        exponent = round(math.log2(deviation / _DEVIATION[spec.dtype]))
        filled = torch.full(specs[scale].shape, 2.0**exponent)
        if specs[scale].dtype == "F8_E8M0":
            filled = filled.to(torch.float8_e8m0fnu)
        yield scale, filled
