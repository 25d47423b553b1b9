"""How the bridge says no: an exception of one line, which `vllm serve` shows as that line alone."""

import argparse
import json
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

OPTION = "--additional-config"
EXAMPLE = '{"atom": {"state_layout": "paged"}}'


# Not a ValueError: pydantic, which validates vLLM's configuration, would bury the line in a report of its own.
class Refused(RuntimeError):
    """A configuration that the bridge cannot honour; one line: what, why, and the way out."""

    def __init__(self, line: str) -> None:
        super().__init__(f"atom-vllm-bridge: {line}")


def prepare_command_line(
    parser: argparse.ArgumentParser, look: Callable[[dict[str, Any]], None]
) -> None:
    """Let a command of vLLM end with one line where the bridge refuses, or where --additional-config is no JSON object.

    Args:
        look: sees the value of --additional-config as soon as it is parsed.
    """
    sys.excepthook = _showing_refusals(sys.excepthook)

    def parse(text: str) -> dict[str, Any]:
        value = additional_config(text)
        look(value)
        return value

    for action in parser._actions:
        if OPTION in action.option_strings:
            action.type = parse


def additional_config(text: str) -> dict[str, Any]:
    """Parse the value of --additional-config.

    Raises:
        argparse.ArgumentTypeError: not a JSON object; vLLM takes such a text for a string, and fails on it much later.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not JSON ({error}). Write an object, such as '{EXAMPLE}'."
        ) from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a JSON object. Write one, such as '{EXAMPLE}'."
        )
    return value


Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def _showing_refusals(otherwise: Hook) -> Hook:
    """An excepthook that prints a refusal without its traceback, and leaves the rest to `otherwise`."""

    def show(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Refused):
            print(error, file=sys.stderr)
        else:
            otherwise(kind, error, trace)

    return show
