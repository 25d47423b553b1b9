"""The catalog of accuracy and acceptance: what its schema refuses, and what its cases say."""

import copy
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import typer
from jsonschema import Draft202012Validator
from typer.testing import CliRunner
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from atom_vllm_bridge.cli.eval import evaluate
from atom_vllm_bridge.measure import catalog
from atom_vllm_bridge.measure.accuracy import Answer, Outcome
from atom_vllm_bridge.measure.server import Counters

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
ENTRIES = json.loads((RECIPES / "catalog.json").read_text(encoding="utf-8"))
CASES = catalog.read(RECIPES / "catalog.json")
IDS = [case.id for case in CASES]


@pytest.fixture(scope="module")
def parser():
    return make_arg_parser(FlexibleArgumentParser())


@pytest.fixture
def write(tmp_path):
    """Write a catalog beside a copy of the schema."""
    shutil.copy(RECIPES / catalog.SCHEMA, tmp_path)

    def written(*entries):
        path = tmp_path / "catalog.json"
        path.write_text(json.dumps({"cases": entries}))
        return path

    return written


def entry(**changes):
    """A case that fits, changed; None removes a key."""
    made = {
        "id": "one",
        "model": "checkpoints/tiny",
        "where": "cpu",
        "flags": "--dtype float32",
        "task": {"name": "schoolbook", "num_fewshot": 8, "limit": 4},
        "thresholds": {"accuracy": 0.9, "acceptance_length": 3},
        "source": "https://example.org",
        "status": {"not_run": "no time"},
    }
    made.update(copy.deepcopy(changes))
    return {name: value for name, value in made.items() if value is not None}


def test_the_schema_is_a_schema():
    schema = json.loads((RECIPES / catalog.SCHEMA).read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(schema)


BROKEN = {
    "no status": {"status": None},
    "no thresholds": {"thresholds": None},
    "no threshold": {"thresholds": {}},
    "an accuracy in percent": {"thresholds": {"accuracy": 94}},
    "less than a token a step": {"thresholds": {"acceptance_length": 0.5}},
    "an unknown figure": {"thresholds": {"speed": 3}},
    "flags as a list": {"flags": ["--dtype", "float32"]},
    "an unknown place": {"where": "somewhere"},
    "an unknown task": {"task": {"name": "mmlu", "num_fewshot": 5}},
    "no shots": {"task": {"name": "gsm8k"}},
    "a number in the environment": {"environment": {"VLLM_ROCM_USE_AITER": 1}},
    "an id that is no file name": {"id": "../one"},
    "measured without a command": {"status": {"measured": {"accuracy": 0.95}}},
    "measured without a figure": {"status": {"measured": {}, "command": "eval"}},
    "not run without a reason": {"status": {"not_run": ""}},
    "measured and not run": {
        "status": {"measured": {"accuracy": 1}, "command": "x", "not_run": "y"}
    },
    "no source": {"source": None},
    "an unknown key": {"note": "hello"},
}


@pytest.mark.parametrize("changes", BROKEN.values(), ids=BROKEN)
def test_a_broken_case_is_refused(write, changes):
    assert catalog.read(write(entry()))[0].id == "one"
    with pytest.raises(catalog.CatalogError, match=r"\$\.cases\[1\]"):
        catalog.read(write(entry(id="zero"), entry(**changes)))


def test_two_cases_of_one_name_are_refused(write):
    with pytest.raises(catalog.CatalogError, match="two cases are called one"):
        catalog.read(write(entry(), entry()))


def test_a_comparison_with_a_case_that_is_not_there_is_refused(write):
    with pytest.raises(catalog.CatalogError, match="differ from two"):
        catalog.read(write(entry(thresholds={"differs_from": "two"})))


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_flags_are_vllms(parser, case):
    args = parser.parse_args([case.model, *case.flags])
    speculative = args.speculative_config
    assert (speculative is None) == ("--speculative-config" not in case.flags)
    if speculative is not None:
        assert speculative["method"] in ("dspark", "mtp")
    lengths = {"acceptance_length", "acceptance_rate"} & set(case.bars)
    assert speculative is not None or not lengths, "nothing is drafted"


@pytest.mark.parametrize("case", ENTRIES["cases"], ids=IDS)
def test_the_flags_can_be_pasted(case):
    assert shlex.join(shlex.split(case["flags"])).count("'") == case["flags"].count("'")


def test_what_is_measured_says_how_and_the_rest_says_why():
    for case in CASES:
        if "measured" in case.status:
            assert case.status["command"].startswith("atom-vllm-bridge eval ")
            assert set(case.bars) - set(case.status["measured"]) == set(), case.id
        else:
            assert case.status["not_run"].endswith(".")


def test_the_tiny_checkpoint_is_measured_in_every_arm():
    tiny = {case.id: case for case in CASES if case.where == "cpu"}
    assert tiny["schoolbook-off"].bars == {"accuracy": 0.95}
    assert tiny["schoolbook-dspark-5"].bars["acceptance_length"] == 3.0
    configs = [
        json.loads(case.flags[case.flags.index("--speculative-config") + 1])
        for case in tiny.values()
        if "--speculative-config" in case.flags
    ]
    assert [(c["method"], c["num_speculative_tokens"]) for c in configs] == [
        ("dspark", 5),
        ("dspark", 7),
        ("dspark", 5),
        ("mtp", 1),
    ]
    assert [c.temperature for c in tiny.values()] == [0, 0, 0, 1, 0]


# ---------------------------------------------------------------------------------------- what runs, and how it is judged


def outcome(name, texts, right, drafts=0, accepted=0.0, positions=5):
    answers = [
        Answer("q", "text", "#### 1", text, strict=i < right, flexible=True)
        for i, text in enumerate(texts)
    ]
    drafted = drafts * positions
    by_position = (accepted / positions,) * positions if drafts else ()
    counters = Counters(0, 0, 0, 0, 0, drafts, drafted, accepted, by_position)
    return Outcome(name, tuple(answers), counters, seconds=1.0)


def only(write, **changes):
    (case,) = catalog.read(write(entry(**changes)))
    return case


def test_a_figure_on_its_bar_passes_and_one_below_fails(write):
    case = only(
        write,
        thresholds={"accuracy": 0.75, "acceptance_length": 3, "acceptance_rate": 0.5},
    )
    result = catalog.judged(case, outcome("one", "abcd", 3, drafts=10, accepted=20), {})
    assert not result.passed
    assert result.rows == [
        ("accuracy", "0.7500", "≥ 0.75", True),
        ("acceptance length", "3.0000", "≥ 3", True),
        ("acceptance rate", "0.4000", "≥ 0.5", False),
    ]
    better = outcome("one", "abcd", 3, drafts=10, accepted=25)
    assert catalog.judged(case, better, {}).passed


def test_a_bar_on_acceptance_fails_where_nothing_is_drafted(write):
    case = only(write, thresholds={"acceptance_length": 1})
    result = catalog.judged(case, outcome("one", "abcd", 4), {})
    assert result.rows == [("acceptance length", "none", "≥ 1", False)]


def test_texts_must_differ_in_more_than_half(write):
    _, case = catalog.read(
        write(entry(), entry(id="warm", thresholds={"differs_from": "one"}))
    )
    greedy = {"one": outcome("one", "abcd", 4)}
    same = catalog.judged(case, outcome("warm", "abxy", 4), greedy)
    other = catalog.judged(case, outcome("warm", "axyz", 4), greedy)
    assert same.rows == [("texts unlike one's", "2 of 4", "> half", False)]
    assert other.passed
    assert not catalog.judged(case, outcome("warm", "axyz", 4), {}).passed


def test_a_case_brings_the_one_that_it_is_compared_with(write):
    cases = catalog.read(
        write(
            entry(),
            entry(id="warm", thresholds={"differs_from": "one"}),
            entry(id="big", where="mi355x"),
        )
    )

    def ids(*names, where="cpu"):
        return [case.id for case in catalog.chosen(cases, names, where)]

    assert ids() == ["one", "warm"]
    assert ids("warm") == ["one", "warm"]
    assert ids("big") == ids(where="mi355x") == ["big"]
    with pytest.raises(catalog.CatalogError, match="no case small; there are one"):
        ids("small")


@pytest.fixture
def served(monkeypatch):
    """Servers that start unless a flag is wrong; every answer is right, and 3 tokens come a step."""

    class Started:
        def __init__(self, model, flags, **_):
            self.flags = flags

        def __enter__(self):
            if "--no-such-flag" in self.flags:
                raise catalog.ServerError("usage\nThe server ended with status 2: log")
            return self

        def __exit__(self, *_):
            pass

    def measure(server, task, name, temperature):
        if task.num_fewshot == 99:
            raise ConnectionError("no hub")
        return outcome(name, "abcd", 4, drafts=10, accepted=20)

    monkeypatch.setattr(catalog, "Server", Started)
    monkeypatch.setattr(catalog, "measure", measure)


def command(path, out, *options):
    app = typer.Typer()
    app.command()(evaluate)
    arguments = ["--catalog", str(path), "--out", str(out), *options]
    return CliRunner().invoke(app, arguments)


def test_a_case_whose_server_does_not_start_fails_and_the_next_one_runs(
    write, tmp_path, served
):
    path = write(entry(flags="--no-such-flag"), entry(id="two"))
    done = command(path, tmp_path / "out")
    assert done.exit_code == 1
    rows = [row for row in done.stdout.splitlines() if row.startswith("| ")][1:]
    assert [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows] == [
        ["one", "cpu", "", "", "FAIL: The server ended with status 2: log"],
        ["two", "cpu", "accuracy 1.0000", "≥ 0.9", "pass"],
        ["two", "cpu", "acceptance length 3.0000", "≥ 3", "pass"],
    ]
    report = json.loads((tmp_path / "out" / "results.json").read_text())
    assert report["passed"] == {"one": False, "two": True}


def test_a_task_that_cannot_be_read_fails_its_case_alone(write, tmp_path, served):
    task = {"name": "schoolbook", "num_fewshot": 99}
    done = command(write(entry(task=task), entry(id="two")), tmp_path / "out")
    assert done.exit_code == 1
    assert re.search(r"\| one .*\| FAIL: no hub", done.stdout)
    report = json.loads((tmp_path / "out" / "results.json").read_text())
    assert report["passed"] == {"one": False, "two": True}


def test_a_missed_bar_fails_and_what_did_not_run_does_not(write, tmp_path, served):
    path = write(
        entry(thresholds={"acceptance_length": 3.1}),
        entry(id="two"),
        entry(id="big", where="mi355x"),
    )
    missed = command(path, tmp_path / "out")
    assert missed.exit_code == 1
    assert re.search(r"length 3.0000 +\| ≥ 3.1 +\| FAIL", missed.stdout)
    chosen = command(path, tmp_path / "out", "--case", "two")
    assert chosen.exit_code == 0, chosen.output
    assert chosen.stdout.count("not run: no time") == 2
    assert command(path, tmp_path / "out", "--where", "h200").exit_code == 1
