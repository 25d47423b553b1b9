"""The container for AMD GPUs, without either: what it would run, what becomes of a result, and the matrix made from it."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RUN = ".github/rocm/run.sh"
PINNED = ".github/rocm/image.digest"
IMAGE = "vllm/vllm-openai-rocm:v0.32.0"
DIGEST = "sha256:" + "0123456789abcdef" * 4
COMMIT = "c3a9e17" + 33 * "0"
RESULT = {
    "arch": "gfx950",
    "gpu": "AMD Instinct MI355X",
    "gpus": 8,
    "date": "2026-12-01",
    "commit": COMMIT,
    "image": f"{IMAGE}@{DIGEST}",
    "versions": {"vllm": "0.32.0", "torch": "2.13.0", "amd-aiter": None},
    "steps": [
        {"name": "doctor", "passed": True, "said": "ok"},
        {"name": "ops", "passed": False, "said": "1 failed, 811 passed"},
    ],
}

# Notes how it is called, and in place of the container leaves a result.
DOCKER = f"""#!/bin/bash
echo "docker $*" >> "$CALLS"
case $1 in
  inspect) echo vllm/vllm-openai-rocm@{DIGEST} ;;
  build) cat > "$CALLS.context" ;;
  run) [[ ! $RESULT ]] || cp "$RESULT" "$OUT/gfx950.json"; exit "$CODE" ;;
esac
"""
GIT = f"""#!/bin/bash
case $1 in
  rev-parse) echo {COMMIT} ;;
  archive) echo the files of "$3$2" ;;
esac
"""


def module(path: str):
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


steps = module(".github/rocm/steps.py")
support = module(".github/scripts/support.py")


@pytest.fixture
def checkout(tmp_path):
    """A copy of what the script needs, with stand-ins for Docker and git, and no digest in the image's file."""
    for folder in (".github/rocm", ".github/scripts"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / PINNED).write_text(f"{IMAGE}\n")
    (tmp_path / "recipes").mkdir()
    shutil.copy(ROOT / "recipes/support.json", tmp_path / "recipes")
    shutil.copy(ROOT / "README.md", tmp_path)
    for name, text in {"docker": DOCKER, "git": GIT}.items():
        (tmp_path / "bin" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def run(checkout: Path, *arguments: str, result=RESULT, code=0, **environment: str):
    if result is not None:
        (checkout / "result.json").write_text(json.dumps(result))
    inherited = {k: v for k, v in os.environ.items() if k != "GITHUB_ACTIONS"}
    return subprocess.run(
        [checkout / RUN, *arguments],
        cwd=checkout.parent,
        env={
            **inherited,
            "PATH": f"{checkout / 'bin'}:{os.environ['PATH']}",
            "CALLS": str(checkout / "calls"),
            "OUT": str(checkout / "build/rocm"),
            "RESULT": "" if result is None else str(checkout / "result.json"),
            "CODE": str(code),
            "HF_HOME": str(checkout / "models"),
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def calls(checkout: Path) -> list[list[str]]:
    path = checkout / "calls"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []  # fmt: skip


# -------------------------------------------------------------------------------------------------------- dry run


def test_a_dry_run_prints_the_container_and_every_step_and_runs_nothing(checkout):
    (checkout / PINNED).write_text(f"{IMAGE}@{DIGEST}\n")
    done = run(checkout, "--dry-run", "--where", "mi355x")
    assert done.returncode == 0, done.stderr
    built, ran, *said = done.stdout.splitlines()
    assert built.startswith(f"git archive {COMMIT} | docker build ")
    assert f"--build-arg IMAGE={IMAGE}@{DIGEST} " in built
    assert built.endswith("--file .github/rocm/Dockerfile -")
    for part in ("--device /dev/kfd", "--device /dev/dri", "--group-add video", "--ipc host"):  # fmt: skip
        assert part in ran
    assert f"--env IMAGE={IMAGE}@{DIGEST} " in ran
    assert ran.split()[-2:] == ["--where", "mi355x"]
    assert [line.split(":")[0] for line in said] == [
        *("doctor", "ops", "ops of aiter", "end to end"),
        *("schoolbook", "schoolbook", "schoolbook", "catalog"),
    ]
    assert said[0] == "doctor: atom-vllm-bridge doctor --selftest"
    assert said[2].startswith("ops of aiter: OPS_TEST_PROVIDER=aiter python3 -m pytest")
    assert "--where mi355x" in said[-1]
    assert calls(checkout) == []
    assert not (checkout / "build").exists()
    assert not (checkout / "recipes/support").exists()


def test_without_the_gpus_of_the_catalog_its_cases_are_left_out(checkout):
    done = run(checkout, "--dry-run")
    assert "schoolbook: " in done.stdout
    assert "catalog: " not in done.stdout


def test_a_dry_run_without_a_digest_shows_that_the_image_is_pulled_and_pins_nothing(
    checkout,
):
    done = run(checkout, "--dry-run")
    assert done.stdout.splitlines()[0].split() == ["docker", "pull", "--quiet", IMAGE]
    assert (checkout / PINNED).read_text() == f"{IMAGE}\n"


def test_an_unknown_option_is_named(checkout):
    done = run(checkout, "--dryrun")
    assert done.returncode == 2
    assert (
        done.stderr
        == "run.sh: no option --dryrun; there are --dry-run and --where GPU.\n"
    )


def test_every_file_and_option_that_a_step_names_exists():
    named = [c for step in steps.steps("mi355x") for c in step.commands]
    helped = {}
    for command in named:
        first, *words = shlex.split(command)
        for word in words:
            if word.startswith(("tests/", "recipes/")):
                assert (ROOT / word).exists(), word
        if first != steps.BRIDGE:
            continue
        verbs = words[: 2 if words[0] == "checkpoint" else 1]
        if tuple(verbs) not in helped:
            helped[tuple(verbs)] = subprocess.run(
                [sys.executable, "-c", "from atom_vllm_bridge.cli import main; main()", *verbs, "--help"],
                env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
                capture_output=True,
                text=True,
                check=True,
            ).stdout  # fmt: skip
        for word in words:
            if word.startswith("--"):
                assert word in helped[tuple(verbs)]
    assert len(helped) == 3


def test_the_cases_for_amds_gpus_are_in_the_catalog():
    cases = json.loads((ROOT / "recipes/catalog.json").read_text())["cases"]
    places = {case["where"] for case in cases}
    usage = (ROOT / RUN).read_text().splitlines()[1]
    offered = re.search(r"--where ([\w|]+)", usage)[1].split("|")
    assert set(offered) == {place for place in places if place.startswith("mi")}


def test_the_container_starts_from_the_image_that_it_is_given():
    lines = (ROOT / ".github/rocm/Dockerfile").read_text().splitlines()
    assert "FROM ${IMAGE}" in lines
    assert not any(re.match(r"FROM (?!\$)", line) for line in lines)


# ------------------------------------------------------------------------------------------------- the real script


def test_a_run_pins_the_image_that_it_got_and_leaves_the_result_in_the_matrix(checkout):
    done = run(checkout, code=1)
    assert done.returncode == 1, "a step failed"
    assert (checkout / PINNED).read_text() == f"{IMAGE}@{DIGEST}\n"
    assert [call[1] for call in calls(checkout)] == ["pull", "inspect", "build", "run"]
    context = (checkout / "calls.context").read_text()
    assert context == f"the files of {COMMIT}\n"
    found = json.loads((checkout / "recipes/support/gfx950.json").read_text())
    assert found == RESULT
    assert (
        "| AMD MI350X, MI355X (gfx950) | failed: ops; passed: doctor "
        "(AMD Instinct MI355X, 2026-12-01, commit c3a9e1700) | `recipes/support/gfx950.json` |"
    ) in (checkout / "README.md").read_text()
    assert run(checkout).returncode == 0
    assert [call[1] for call in calls(checkout)][4:] == ["build", "run"]


def test_a_runner_refuses_an_image_without_a_digest_in_one_line(checkout):
    done = run(checkout, GITHUB_ACTIONS="true")
    assert done.returncode == 1
    (line,) = done.stdout.splitlines()
    assert line.startswith(
        f"::error::{PINNED} names {IMAGE} without a digest: run {RUN}"
    )
    assert calls(checkout) == []


def test_a_container_that_does_not_start_leaves_the_matrix_alone(checkout):
    stale = checkout / "build/rocm"
    stale.mkdir(parents=True)
    (stale / "gfx942.json").write_text("{}")
    done = run(checkout, result=None, code=125)
    assert done.returncode == 1
    assert "the container ended with 125 before a step had" in done.stderr
    assert not (checkout / "recipes/support").exists()


# ------------------------------------------------------------------------------------------------------- the steps


def test_a_step_passes_if_each_of_its_commands_does_and_stops_at_the_first_that_fails(
    tmp_path,
):
    python = shlex.quote(sys.executable)
    say = f"{python} -c \"import os; print('12 passed in 3.4s', os.environ['X'])\""
    good = steps.Step("end to end", (say, f"{python} -c 'print(7)'"), {"X": "1"})
    assert steps.run(good, tmp_path) == {
        "name": "end to end",
        "passed": True,
        "said": "7",
    }
    log = (tmp_path / "end-to-end.log").read_text()
    assert log == "12 passed in 3.4s 1\n7\n"
    bad = steps.Step(
        "ops",
        (f"{python} -c 'print(\"= 3 failed in 4.5s =\"); exit(2)'", f"{python} -c 0/0"),
        {},
    )
    assert steps.run(bad, tmp_path) == {
        "name": "ops",
        "passed": False,
        "said": "3 failed",
    }


def test_the_ops_do_not_pass_under_a_provider_that_is_not_there():
    done = subprocess.run(
        [*shlex.split(steps.PYTEST.replace("python3", sys.executable)), "tests/ops/test_rows.py"],
        cwd=ROOT,
        env={**os.environ, "OPS_TEST_PROVIDER": "nobody"},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "OPS_TEST_PROVIDER=nobody, which has no op" in done.stderr


def test_the_result_names_the_machine_and_each_step(tmp_path, monkeypatch, capsys):
    fact = {key: value for key, value in RESULT.items() if key != "steps"}
    monkeypatch.setattr(steps, "machine", lambda: dict(fact))
    python = shlex.quote(sys.executable)
    doomed = steps.Step("ops", (f"{python} -c 1/0",), {})
    after = steps.Step("end to end", (f"{python} -c 'print(1)'",), {})
    monkeypatch.setattr(steps, "STEPS", (doomed, after))
    monkeypatch.delenv("OWNER", raising=False)
    assert steps.main(["--out", str(tmp_path)]) == 1
    result = json.loads((tmp_path / "gfx950.json").read_text())
    said = "ZeroDivisionError: division by zero"
    assert result == fact | {
        "steps": [
            {"name": "ops", "passed": False, "said": said},
            {"name": "end to end", "passed": True, "said": "1"},
        ]
    }
    assert "untested" not in support.table(ROWS[1:], tmp_path)


# ------------------------------------------------------------------------------------------------------ the matrix

ROWS = [
    {"devices": "CPU", "state": "tested", "how": "`make test`"},
    {"devices": "AMD MI355X", "arch": "gfx950"},
]


def test_a_device_without_a_result_is_untested_and_the_row_says_how_to_change_that(
    tmp_path,
):
    _, _, cpu, amd = support.table(ROWS, tmp_path).splitlines()
    assert cpu == "| CPU | tested | `make test` |"
    assert amd.startswith("| AMD MI355X (gfx950) | untested on hardware | ")
    assert amd.endswith(f"`{RUN}` |")


@pytest.mark.parametrize(
    "broken",
    [
        "",
        "[]",
        "{}",
        json.dumps(RESULT | {"steps": []}),
        json.dumps(RESULT | {"arch": "gfx942"}),
    ],
)
def test_a_file_that_is_no_result_is_refused_by_name(tmp_path, broken):
    (tmp_path / "gfx950.json").write_text(broken)
    with pytest.raises(ValueError, match=r"gfx950\.json is not a result of run\.sh"):
        support.table(ROWS, tmp_path)


def test_a_result_of_a_gpu_without_a_row_is_refused(tmp_path):
    (tmp_path / "gfx1201.json").write_text(json.dumps(RESULT | {"arch": "gfx1201"}))
    with pytest.raises(ValueError, match="has no row for gfx1201"):
        support.table(ROWS, tmp_path)


def test_readme_has_the_matrix_of_the_results_that_are_there():
    text = (ROOT / "README.md").read_text("utf-8")
    rows = json.loads((ROOT / "recipes/support.json").read_text())["rows"]
    assert support.replaced(text, support.table(rows, ROOT / "recipes/support")) == text
    archs = {row["arch"] for row in rows if "arch" in row}
    assert archs == {"gfx942", "gfx950"}
    for arch in archs:
        if not (ROOT / f"recipes/support/{arch}.json").exists():
            (row,) = [line for line in text.splitlines() if f"({arch})" in line]
            assert support.UNTESTED in row
            assert f"`{RUN}`" in row
    with pytest.raises(ValueError, match="lacks"):
        support.replaced("no marks", "")
