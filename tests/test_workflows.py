"""What CI promises: which events start which suites, and that what the workflows call exists."""

import contextlib
import io
import itertools
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest import mock

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
GITHUB = ROOT / ".github"
PAYLOADS = Path(__file__).parent / "payloads"
COMMENT = (GITHUB / "ci-labels.md").read_text("utf-8")
# YAML 1.1, which PyYAML reads, takes the key `on` for True.
WORKFLOWS = {
    path.name: yaml.safe_load(path.read_text("utf-8"))
    for path in sorted((GITHUB / "workflows").iterdir())
}
STEPS = [
    (name, step)
    for name, workflow in WORKFLOWS.items()
    for job in workflow["jobs"].values()
    for step in job["steps"]
]
RUNS = [step["run"] for _, step in STEPS if "run" in step]


def outputs(script: str, *arguments: str, **environment: str) -> dict[str, str]:
    """What the script hands to GITHUB_OUTPUT, which takes one `name=value` a line."""
    path, printed = str(GITHUB / "scripts" / script), io.StringIO()
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(sys, "argv", [path, *arguments]),
        contextlib.redirect_stdout(printed),
    ):
        runpy.run_path(path, run_name="__main__")
    lines = printed.getvalue().splitlines()
    pairs = dict(line.split("=", 1) for line in lines)
    assert len(pairs) == len(lines), "a name is set twice"
    return pairs


def gate(payload: Path, event: str = "") -> dict[str, str]:
    recorded = "review" in json.loads(payload.read_text("utf-8"))
    event = event or ("pull_request_review" if recorded else "pull_request")
    return outputs("gate.py", GITHUB_EVENT_NAME=event, GITHUB_EVENT_PATH=str(payload))


NO_LABEL = "neither ci:vllm nor ci:full is set"
UNTRUSTED = "the reviewer is not a member of the project"
DRAFT = "a draft: it starts when the pull request is ready for review"
# payload: what starts, and why the suite vllm does or does not.
DECISIONS = {
    "labelled-vllm": ("vllm gpu", "label ci:vllm"),
    "labelled-full": ("vllm atom gpu", "label ci:full"),
    "labelled-atom": ("atom", "the label that was added does not start it"),
    "labelled-sglang": ("", "ci:sglang does not apply to this project"),
    "labelled-documentation-beside-vllm": (
        "",
        "the label that was added does not start it",
    ),
    "pushed-with-vllm": ("vllm gpu", "label ci:vllm"),
    "pushed-without-labels": ("", NO_LABEL),
    "unlabelled-vllm": ("", "this action starts nothing"),
    "draft-labelled-vllm": ("", DRAFT),
    "draft-made-ready": ("vllm gpu", "label ci:vllm"),
    "closed-labelled-vllm": ("", "the pull request is closed"),
    "fork-labelled-vllm": ("vllm", "label ci:vllm"),
    "deleted-fork-labelled-vllm": ("vllm", "label ci:vllm"),
    "approved": ("vllm gpu", "approving review"),
    "approved-beside-vllm": ("", "its label has started it for this commit"),
    "approved-older-commit": ("", "the approval is of an older commit"),
    "approved-by-a-stranger": ("", UNTRUSTED),
    "approved-draft": ("", DRAFT),
    "fork-approved": ("vllm", "approving review"),
    "fork-approved-by-its-author": ("", UNTRUSTED),
    "commented": ("", "the review does not approve"),
    "changes-requested": ("", "the review does not approve"),
}


def test_every_payload_has_a_decision():
    assert {path.stem for path in PAYLOADS.iterdir()} == set(DECISIONS)


@pytest.mark.parametrize("name", DECISIONS)
def test_the_gate_starts_what_the_event_asks_for_and_says_why(name):
    started, why = DECISIONS[name]
    decided = gate(PAYLOADS / f"{name}.json")
    flags = {suite: decided[suite] for suite in ("vllm", "atom", "gpu")}
    assert set(flags.values()) <= {"true", "false"}
    assert [suite for suite in flags if flags[suite] == "true"] == started.split()
    assert decided["vllm_why"] == why


def test_a_forks_code_stays_off_our_own_runners_and_the_gate_says_so():
    decided = gate(PAYLOADS / "fork-labelled-vllm.json")
    assert decided["gpu_why"] == "a fork's code runs on GitHub's machines only"


@pytest.mark.parametrize("event", ["pull_request_target", "workflow_run", "push"])
def test_events_with_the_projects_own_rights_start_nothing(event):
    decided = gate(PAYLOADS / "labelled-full.json", event)
    assert {decided[name] for name in ("vllm", "atom", "gpu")} == {"false"}


def test_nothing_that_a_contributor_writes_reaches_the_outputs():
    path = PAYLOADS / "fork-labelled-vllm.json"
    pull = json.loads(path.read_text("utf-8"))["pull_request"]
    assert "\ngpu=true" in pull["title"], "the payload no longer attacks"
    assert "$(id)" in pull["head"]["ref"], "the payload no longer attacks"
    decided = gate(path)
    assert decided["gpu"] == "false"
    assert "id" not in " ".join(decided.values()).split()
    assert "$" not in "".join(decided.values())


def test_the_comment_names_the_labels_that_the_gate_knows():
    known = set(re.findall(r'"(ci:\w+)"', (GITHUB / "scripts/gate.py").read_text()))
    assert set(re.findall(r"ci:\w+", COMMENT)) == known
    assert known == {"ci:vllm", "ci:full", "ci:atom", "ci:sglang"}


def test_the_gate_hears_the_labels_and_the_reviews():
    heard = WORKFLOWS["atom-vllm-test.yaml"][True]
    assert {"labeled", "synchronize", "ready_for_review"} <= set(
        heard["pull_request"]["types"]
    )
    assert heard["pull_request_review"]["types"] == ["submitted"]
    assert set(heard) == {"pull_request", "pull_request_review"}


def test_the_cases_wait_for_the_gate_and_for_pre_checkin():
    jobs = WORKFLOWS["atom-vllm-test.yaml"]["jobs"]
    for job in ("cpu", "gpu", "rocm"):
        assert jobs[job]["needs"] == ["gate", "pre-checkin-passed"]
    assert jobs["pre-checkin-passed"]["if"] == "needs.gate.outputs.vllm == 'true'"
    assert jobs["atom"]["if"] == "needs.gate.outputs.atom == 'true'"


def test_the_cases_on_the_cpu_have_their_checkpoints_before_they_are_asked():
    steps = WORKFLOWS["atom-vllm-test.yaml"]["jobs"]["cpu"]["steps"]
    runs = [step.get("run", "") for step in steps]
    (asked,) = [i for i, run in enumerate(runs) if " eval " in run]
    assert "make checkpoints" in runs[:asked]


DSPARK = """--seed 1 --speculative-config '{"method": "dspark"}'"""
SAMPLE = {
    "cases": [
        {"id": "tiny-dspark", "model": "tiny", "where": "cpu", "flags": DSPARK},
        {"id": "tiny-off", "model": "tiny", "where": "cpu", "flags": ""},
        {"id": "flash", "model": "flash", "where": "h200", "flags": "-tp 4"},
        {"id": "pro", "model": "pro", "where": "mi355x", "flags": "-tp 8"},
    ]
}


def test_every_case_goes_to_its_runner_with_its_flags_unchanged(tmp_path):
    catalog = tmp_path / "catalog.json"
    catalog.write_text(json.dumps(SAMPLE))
    made = outputs("cases.py", str(catalog), RUNNERS='{"h200": "our-h200"}')
    cpu, gpu = json.loads(made["cpu"]), json.loads(made["gpu"])
    assert [entry["case"] for entry in cpu] == SAMPLE["cases"][:2]
    assert {entry["runner"] for entry in cpu} == {"ubuntu-24.04"}
    assert gpu == [{"runner": "our-h200", "case": SAMPLE["cases"][2]}]
    assert made["left_out"] == "pro"


@pytest.mark.parametrize("runners", ["", "{}", '{"cpu": "our-h200"}'])
def test_without_a_runner_the_gpu_cases_are_left_out_by_name(tmp_path, runners):
    catalog = tmp_path / "catalog.json"
    catalog.write_text(json.dumps(SAMPLE))
    made = outputs("cases.py", str(catalog), RUNNERS=runners)
    assert [entry["runner"] for entry in json.loads(made["cpu"])] == [
        "ubuntu-24.04"
    ] * 2
    assert made["gpu"] == "[]"
    assert made["left_out"] == "flash pro"


def test_amds_runners_get_the_container_and_not_single_cases(tmp_path):
    catalog = tmp_path / "catalog.json"
    catalog.write_text(json.dumps(SAMPLE))
    runners = {"h200": "our-h200", "mi355x": "our-mi355x", "mi300x": "our-mi300x"}
    made = outputs("cases.py", str(catalog), RUNNERS=json.dumps(runners))
    assert [entry["runner"] for entry in json.loads(made["gpu"])] == ["our-h200"]
    assert json.loads(made["rocm"]) == [
        {"runner": "our-mi355x", "where": "mi355x"},
        {"runner": "our-mi300x", "where": ""},
    ]
    assert made["left_out"] == ""
    without = outputs("cases.py", str(catalog), RUNNERS="")
    assert without["rocm"] == "[]"
    assert without["left_out"] == "flash pro"


def test_the_catalog_gives_ci_a_case_on_the_cpu_with_dspark():
    made = outputs("cases.py", str(ROOT / "recipes/catalog.json"))
    assert any("dspark" in json.dumps(entry) for entry in json.loads(made["cpu"]))


def run_with_gh(tmp_path: Path, script: str, gh: str, **environment: str):
    """Runs a script with a stand-in for gh, and with a sleep that does not; gives what gh was asked for, too."""
    for name, text in {"gh": gh, "sleep": ""}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    asked = tmp_path / "asked"
    asked.touch()
    done = subprocess.run(
        [GITHUB / "scripts" / script],
        cwd=ROOT,
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "ASKED": str(asked),
            "GITHUB_REPOSITORY": "example-org/atom-vllm-bridge",
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done, asked.read_text().splitlines()


@pytest.mark.parametrize(
    ("third", "code"), [("success", 0), ("failure", 1), ("cancelled", 1)]
)
def test_the_cases_wait_until_pre_checkin_has_ended_for_their_commit(
    tmp_path, third, code
):
    gh = f'echo "$@" >> "$ASKED"; [[ $(wc -l < "$ASKED") -lt 3 ]] || echo {third}'
    done, asked = run_with_gh(tmp_path, "await_pre_checkin.sh", gh, COMMIT="c3a9e17")
    assert done.returncode == code, done.stderr
    assert len(asked) == 3
    assert "--workflow pre-checkin.yaml" in asked[0]
    assert "--commit c3a9e17" in asked[0]
    assert (GITHUB / "workflows/pre-checkin.yaml").exists()
    if code:
        assert f"::error::pre-checkin ended with '{third}' for c3a9e17" in done.stdout


def test_a_pre_checkin_that_never_ends_starts_nothing(tmp_path):
    gh = 'echo "$@" >> "$ASKED"'
    done, asked = run_with_gh(tmp_path, "await_pre_checkin.sh", gh, COMMIT="c3a9e17")
    assert done.returncode == 1
    assert len(asked) == 100
    assert "has not ended" in done.stdout


@pytest.mark.parametrize(
    ("posted", "request_"),
    [
        ("", "--method POST repos/example-org/atom-vllm-bridge/issues/41/comments"),
        (
            "501\n502",
            "--method PATCH repos/example-org/atom-vllm-bridge/issues/comments/501",
        ),
    ],
    ids=["first", "again"],
)
def test_the_labels_are_explained_once_and_then_kept_up_to_date(
    tmp_path, posted, request_
):
    gh = 'echo "$@" >> "$ASKED"; [[ $2 != --paginate ]] || [[ -z $POSTED ]] || echo "$POSTED"'
    done, asked = run_with_gh(
        tmp_path, "comment_labels.sh", gh, NUMBER="41", POSTED=posted
    )
    assert done.returncode == 0, done.stderr
    assert len(asked) == 2
    assert COMMENT.splitlines()[0] in asked[0], "the search misses the comment's mark"
    assert f"{request_} --field body=@.github/ci-labels.md" in asked[1]


def test_no_script_is_built_from_an_expression():
    assert [run for run in RUNS if "${{" in run] == []


def test_every_action_is_pinned_to_a_commit_and_keeps_no_token():
    used = [(name, step) for name, step in STEPS if "uses" in step]
    for name, step in used:
        assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", step["uses"]), name
        if step["uses"].startswith("actions/checkout@"):
            assert step["with"] == {"persist-credentials": False}, name
    assert used


def test_every_job_has_a_time_limit_and_only_the_comment_may_write():
    for name, workflow in WORKFLOWS.items():
        granted = [workflow["permissions"]]
        for job in workflow["jobs"].values():
            assert job["timeout-minutes"] <= 240, name
            granted.append(job.get("permissions", {}))
        written = {key for grant in granted for key in grant if grant[key] == "write"}
        expected = {"pull-requests"} if name == "explain-labels.yaml" else set()
        assert written == expected, name
        assert not re.search(r"secrets[.\[]\S", json.dumps(workflow["jobs"])), name


def test_a_token_that_writes_never_meets_the_pull_requests_code():
    targets = [
        name for name, flow in WORKFLOWS.items() if "pull_request_target" in flow[True]
    ]
    assert targets == ["explain-labels.yaml"]
    # Nothing of the head: the checkout takes the base, and all that runs is the script from it.
    assert "head" not in json.dumps(WORKFLOWS["explain-labels.yaml"]["jobs"])
    runs = [step["run"] for name, step in STEPS if name in targets and "run" in step]
    assert runs == [".github/scripts/comment_labels.sh"]


def test_pre_checkin_tests_on_every_python_that_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    jobs = WORKFLOWS["pre-checkin.yaml"]["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == declared
    assert set(WORKFLOWS["pre-checkin.yaml"][True]) == {"push", "pull_request"}
    # No filter: every pull request, drafts and forks too.
    assert WORKFLOWS["pre-checkin.yaml"][True]["pull_request"] is None


def commands(tool: str) -> list[list[str]]:
    """The arguments of each call of the tool in the workflows."""
    calls = []
    for line in "\n".join(RUNS).splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars="|;&")
        words.whitespace_split = True
        for piped, call in itertools.groupby(words, lambda word: word[0] in "|;&"):
            first, *arguments = call
            if not piped and first.split("/")[-1] == tool:
                calls.append(arguments)
    return calls


def test_every_make_target_and_variable_that_is_called_exists():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.search(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)[1].split()
    called = commands("make")
    for target, *variables in called:
        assert target in targets
        for variable in variables:
            assert re.search(rf"^{variable.split('=')[0]} \?=", makefile, re.MULTILINE)
    assert {target for target, *_ in called} >= {"lint", "test", "checkpoints"}


def test_every_command_of_ours_that_is_called_exists_with_its_options():
    called = {(call[0], *call[1:]) for call in commands("atom-vllm-bridge")}
    assert {call[0] for call in called} == {"doctor", "eval"}
    for name, *arguments in called:
        code = "from atom_vllm_bridge.cli import main; main()"
        helped = subprocess.run(
            [sys.executable, "-c", code, name, "--help"],
            env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert helped.returncode == 0, helped.stderr
        for option in arguments:
            if option.startswith("--"):
                assert option in helped.stdout


def test_every_file_and_extra_that_is_named_exists():
    named = {
        word
        for run in RUNS
        for word in re.findall(r"(?:\.github|recipes|tests)/[\w./-]+\w", run)
    }
    assert {"recipes/catalog.json", "tests/models", "tests/ops"} <= named
    assert {word for word in named if not (ROOT / word).exists()} == set()
    extras = set(re.findall(r"'\.\[(\w+)\]'", "\n".join(RUNS)))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extras <= set(project["optional-dependencies"])
