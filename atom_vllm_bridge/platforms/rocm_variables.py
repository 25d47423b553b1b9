"""Environment variables of the commands that are published for AMD GPUs: what each does to DeepSeek-V4 through the bridge.

Several are read where a misspelt value counts as off without a word; here it is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from atom_vllm_bridge.platforms.refusal import Refused

USE_AITER = "VLLM_ROCM_USE_AITER"


@dataclass(frozen=True)
class Variable:
    """
    Attributes:
        name: of the variable.
        values: those that are honoured, in lower case; the first is as if it were not set.
        means: what it does, for the table at the start.
        otherwise: why another value is refused.
    """

    name: str
    values: tuple[str, ...]
    means: str
    otherwise: str


_SWITCH = ("0", "1")
_AITERS = "aiter takes 1 for on and anything else for off"

VARIABLES = (
    Variable(
        USE_AITER,
        ("1", "true", "0", "false"),
        "off: ops of Triton and torch; else aiter's where they fit",
        "it is neither on nor off",
    ),
    Variable(
        "VLLM_ROCM_AITER_MOE_DISPATCH_POLICY",
        ("0",),
        "aiter sorts tokens for experts as it chooses",
        "the native model hands no policy to aiter's experts, which is 0",
    ),
    Variable("AITER_USE_CK_MOE_SORTING", _SWITCH, "read by aiter", _AITERS),
    Variable("AITER_USE_FLYDSL_MOE_SORTING", _SWITCH, "read by aiter", _AITERS),
    Variable(
        "SAFETENSORS_FAST_GPU",
        _SWITCH,
        "nothing: no library here reads it",
        "it is neither 0 nor 1",
    ),
    Variable(
        "VLLM_USE_BREAKABLE_CUDAGRAPH",
        _SWITCH,
        "nothing: a graph holds a whole decode step",
        "vLLM takes 1 for on and anything else for off",
    ),
)


def refuse_what_is_not_honoured(environ: Mapping[str, str]) -> None:
    """Raise `Refused` for a value that would be ignored, or taken for another.

    Raises:
        Refused: which variable, why, and the values that there are.
    """
    for variable in VARIABLES:
        value = environ.get(variable.name)
        if value is not None and value.lower() not in variable.values:
            raise Refused(
                f"{variable.name}={value} is not honoured: {variable.otherwise}. "
                f"Set it to {' or '.join(variable.values)}, or unset it."
            )


def aiter_is_off(environ: Mapping[str, str]) -> bool:
    """Whether the user turned aiter off; not naming it leaves it on, where its kernels are the faster ones."""
    return environ.get(USE_AITER, "").lower() in ("0", "false")


def said(environ: Mapping[str, str]) -> str:
    """What is set, and what it does; for the table at the start."""
    return "; ".join(
        f"{variable.name}={environ[variable.name]} ({variable.means})"
        for variable in VARIABLES
        if variable.name in environ
    )
