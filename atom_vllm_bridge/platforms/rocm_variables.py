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
        values: what is honoured, in lower case, and what it does, for the table at the start.
        otherwise: why another value is refused.
    """

    name: str
    values: dict[str, str]
    otherwise: str


def _switch(what: str) -> dict[str, str]:
    return {"0": what, "1": what}


_AITER = "aiter's ops where they fit"
_NO_AITER = "Triton's and torch's ops before aiter's"
_ONE_IS_ON = "takes 1 for on and anything else for off"

VARIABLES = (
    Variable(
        USE_AITER,
        {"1": _AITER, "true": _AITER, "0": _NO_AITER, "false": _NO_AITER},
        "it is neither on nor off",
    ),
    Variable(
        "VLLM_ROCM_AITER_MOE_DISPATCH_POLICY",
        {"0": "aiter sorts tokens for experts as it chooses"},
        "the native model hands no policy to aiter's experts, which is 0",
    ),
    Variable(
        "AITER_USE_CK_MOE_SORTING", _switch("read by aiter"), f"aiter {_ONE_IS_ON}"
    ),
    Variable(
        "AITER_USE_FLYDSL_MOE_SORTING", _switch("read by aiter"), f"aiter {_ONE_IS_ON}"
    ),
    Variable(
        "SAFETENSORS_FAST_GPU",
        _switch("nothing: no library here reads it"),
        "it is neither 0 nor 1",
    ),
    Variable(
        "VLLM_USE_BREAKABLE_CUDAGRAPH",
        _switch("nothing: a graph holds a whole decode step"),
        f"vLLM {_ONE_IS_ON}",
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
    """What is set of that which is honoured, and what it does; for the table at the start."""
    return "; ".join(
        f"{variable.name}={value} ({variable.values[value.lower()]})"
        for variable in VARIABLES
        if (value := environ.get(variable.name)) is not None
    )
