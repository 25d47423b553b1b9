"""Commands in the documents are those that vLLM and the bridge take: each is parsed, as it is printed, by the real parser."""

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
from vllm.benchmarks.serve import add_cli_args
from vllm.entrypoints.launchers.cli_args import (
    make_arg_parser,
    validate_parsed_serve_args,
)
from vllm.utils.argparse_utils import FlexibleArgumentParser

from atom_vllm_bridge import cli
from atom_vllm_bridge.cli import doctor
from atom_vllm_bridge.measure import catalog
from atom_vllm_bridge.settings import MODEL, NATIVE, Settings

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```.*?\n(.*?)^```", re.MULTILINE | re.DOTALL)
ASSIGNMENT = re.compile(r"[A-Z][A-Z0-9_]*=")
CASES = [case.id for case in catalog.read(ROOT / "recipes/catalog.json")]


def lines_of(document: Path) -> Iterator[str]:
    """Commands in fences, continued lines joined; neither a prompt nor what is printed."""
    for block in FENCE.findall(document.read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines():
            yield line.removeprefix("$ ")


def command_of(line: str) -> tuple[dict[str, str], list[str]]:
    """Variables and words of a line of shell; no words for one that is no command of vLLM's or ours."""
    variables, rest = {}, line
    while found := ASSIGNMENT.match(rest):
        word, _, rest = rest.partition(" ")
        variables[found[0][:-1]] = word.partition("=")[2]
    if not rest.startswith(("vllm ", "atom-vllm-bridge ")):
        return variables, []
    return variables, shlex.split(rest, comments=True)


COMMANDS = [
    pytest.param(variables, words, id=f"{document.name}: {line.strip()[:60]}")
    for document in DOCUMENTS
    for line in lines_of(document)
    for variables, words in [command_of(line)]
    # Brackets are those of a synopsis, which names every option once.
    if words and not any(word.startswith("[") for word in words)
]


class Parsed(Exception):
    """The command line was taken; what it asks for is not done."""


def stop(*_, **__):
    raise Parsed


def leaves(command) -> Iterator[Any]:
    """Commands that do something."""
    below = getattr(command, "commands", None)
    if below is None:
        yield command
    for one in (below or {}).values():
        yield from leaves(one)


def parse(words: list[str], monkeypatch) -> None:
    """Fail (SystemExit, or the parser's own error) for a command that its program would not take."""
    if words[:2] == ["vllm", "serve"]:
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(words[2:])
        validate_parsed_serve_args(args)
    elif words[:3] == ["vllm", "bench", "serve"]:
        parser = FlexibleArgumentParser()
        add_cli_args(parser)
        parser.parse_args(words[3:])
    elif words[:2] == ["atom-vllm-bridge", "doctor"]:
        monkeypatch.setattr(doctor, "examine", stop)
        with pytest.raises(Parsed):
            doctor.main(words[2:])
    elif words[0] == "atom-vllm-bridge":
        command = typer.main.get_command(cli.application())
        for one in leaves(command):
            one.callback = stop
        with pytest.raises(Parsed):
            command.main(words[1:], standalone_mode=False)
    else:
        pytest.fail(f"no parser is known for {words}")


@pytest.mark.parametrize(("variables", "words"), COMMANDS)
def test_a_documented_command_is_taken(variables, words, monkeypatch):
    Settings.read(None, variables)
    # A command that names the model sets it for its process.
    monkeypatch.setenv(MODEL, NATIVE)
    parse(words, monkeypatch)
    for flag, value in pairwise(words):
        if flag == "--case":
            assert value in CASES


def test_every_kind_of_command_is_documented():
    kinds = {tuple(parameter.values[1][:2]) for parameter in COMMANDS}
    ours = {
        ("atom-vllm-bridge", name) for name in ("doctor", "checkpoint", "eval", "bench")
    }
    assert kinds >= ours | {("vllm", "serve"), ("vllm", "bench")}


def test_the_recipes_launch_measure_and_ask():
    """Flash and Pro, with and without DSpark, on each kind of device."""
    text = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    for title in (
        "Flash on AMD GPUs (ROCm)",
        "Pro on AMD GPUs (ROCm)",
        "Flash on NVIDIA GPUs (CUDA)",
        "Pro on NVIDIA GPUs (CUDA)",
        "On a CPU",
    ):
        joined = sections[title].replace("\\\n", " ")
        served = re.findall(r"^.*vllm serve .*$", joined, re.M)
        assert {'"dspark"' in line for line in served} == {True, False}, title
        assert re.search(r"^(vllm bench serve|atom-vllm-bridge bench) ", joined, re.M)
        assert re.search(r"^atom-vllm-bridge eval ", joined, re.M)


@pytest.mark.parametrize(
    "words",
    [
        "vllm serve DIR --no-such-flag",
        "vllm serve DIR --speculative-config {method:dspark",
        "vllm bench serve --dataset-name nothing",
        "atom-vllm-bridge bench DIR --preset nothing",
        "atom-vllm-bridge checkpoint make",
        "atom-vllm-bridge doctor --no-such-flag",
    ],
)
def test_a_command_that_would_fail_is_found(words, monkeypatch):
    with pytest.raises((SystemExit, typer.BadParameter)):
        parse(words.split(), monkeypatch)
