"""`atom-vllm-bridge eval`: what it asks, what it counts as right, and what it says of arms that disagree."""

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import typer
from completions import answering
from typer.testing import CliRunner

from atom_vllm_bridge.cli.eval import evaluate
from atom_vllm_bridge.measure.accuracy import (
    ARMS,
    Answer,
    Outcome,
    Score,
    Task,
    checks,
    measure,
    table,
)
from atom_vllm_bridge.measure.server import (
    Counters,
    LiveServer,
    Server,
    ServerError,
)

NOTHING = Counters(0, 0, 0, 0, 0, 0, 0, 0, ())


def problem(i, split="text"):
    return {
        "question": f"What is {i} times 1000?",
        "answer": f"{i} times 1000 is {i}000.\n#### {i}000",
        "split": split,
        "steps": 1,
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Eight questions, their splits in turn, and twelve worked examples in two editions."""
    folder = tmp_path_factory.mktemp("problems")
    files = {
        "schoolbook_test": [
            problem(i, "text" if i % 2 else "template") for i in range(1, 9)
        ],
        "schoolbook_shots": [problem(i) for i in range(21, 33)],
        "schoolbook_shots_renumbered": [problem(i) for i in range(51, 63)],
    }
    for name, rows in files.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    return folder


def asked(body):
    return int(re.findall(r"What is (\d+) times", body["prompt"])[-1])


def solved(body):
    """Right with its marks, but 2 and 7: without the marks, 3: with another form, 8: wrong."""
    i = asked(body)
    special = {
        2: " So 2000.",
        7: " 1 and 7,000.",
        3: " so\n#### 3,000.",
        8: " #### 8",
    }
    return special.get(i, f" {i} times 1000 is {i}000.\n#### {i}000")


@pytest.fixture(scope="module")
def live(data):
    """Two examples a question, greedy, from a server that answers `solved`: the server and the outcome."""
    with answering(solved) as fake, LiveServer(fake.url) as server:
        task = Task(num_fewshot=2, folder=data, concurrency=4)
        yield fake, measure(server, task, "off", speculates=False)


def test_a_question_comes_after_its_worked_examples_as_gsm8ks_do(live):
    fake, _ = live
    assert sorted(map(asked, fake.bodies)) == list(range(1, 9))
    for body in fake.bodies:
        first, second, question = body["prompt"].split("\n\n")
        for shot in (first, second):
            i = int(re.match(r"Question: What is (\d+) ", shot)[1])
            known = problem(i)
            assert 21 <= i <= 32
            assert shot == f"Question: {known['question']}\nAnswer: {known['answer']}"
        assert question == f"Question: What is {asked(body)} times 1000?\nAnswer:"
        assert body["stop"] == ["Question:", "\n\n"]
        assert body["temperature"] == 0
        assert body["model"] == "m"
    assert len({body["prompt"] for body in fake.bodies}) == 8


def test_strict_wants_the_marks_and_flexible_the_last_number(live):
    _, outcome = live
    assert [a.question for a in outcome.answers] == [
        problem(i)["question"] for i in range(1, 9)
    ]
    strict = [i for i, a in enumerate(outcome.answers, 1) if a.strict]
    flexible = [i for i, a in enumerate(outcome.answers, 1) if a.flexible]
    assert strict == [1, 3, 4, 5, 6]
    assert flexible == [1, 2, 3, 4, 5, 6, 7]
    assert outcome.score().value == 5 / 8
    assert outcome.score("flexible").value == 7 / 8
    assert outcome.splits == ["text", "template"]
    assert outcome.score(split="text").value == 3 / 4
    assert outcome.score(split="template").value == 2 / 4
    assert outcome.answers[1].text == " So 2000."


def test_only_what_the_server_counted_meanwhile_is_the_arms(live):
    counters = live[1].counters
    assert counters.prompt_tokens == counters.drafts == 80
    assert counters.acceptance_length == 2.5
    assert counters.acceptance_rate == 0.75
    assert counters.acceptance_by_position == (1.0, 0.5)


def test_nothing_but_the_server_is_asked(data, monkeypatch):
    """No hub, no tokenizer, no data set."""
    connect, found = socket.socket.connect, []

    def watched(self, address):
        found.append(address[0])
        return connect(self, address)

    with answering(solved) as fake, LiveServer(fake.url) as server:
        monkeypatch.setattr(socket.socket, "connect", watched)
        measure(server, Task(num_fewshot=1, limit=2, folder=data), "off")
    assert set(found) == {"127.0.0.1"}


def test_temperature_shots_and_limit_reach_the_server(data):
    with answering(solved) as fake, LiveServer(fake.url) as server:
        task = Task("schoolbook_renumbered", 3, 4, data)
        outcome = measure(server, task, "dspark-t1", temperature=1.0)
    assert [body["temperature"] for body in fake.bodies] == [1.0] * 4
    assert sorted(map(asked, fake.bodies)) == [1, 2, 3, 4]
    assert outcome.splits == ["text", "template"]
    for body in fake.bodies:
        *shots, _ = re.findall(r"What is (\d+) times", body["prompt"])
        assert len(shots) == 3
        assert all(51 <= int(i) <= 62 for i in shots)


def test_the_standard_error_is_that_of_a_mean():
    right = [True] * 6 + [False] * 2
    mean = 6 / 8
    variance = sum((r - mean) ** 2 for r in right) / 7
    assert Score.of(right) == Score(mean, pytest.approx(math.sqrt(variance / 8)), 8)
    assert str(Score.of([True] * 4)) == "1.000 ± 0.000"


# ------------------------------------------------------------------------------------------------- between arms


def outcome(name, right, texts="same", drafts=100, total=100):
    """`right` answers of `total`, as an arm of that name would have them."""
    answers = tuple(
        Answer("q", "", "#### 1", f"{texts} {i}", i < right, i < right)
        for i in range(total)
    )
    arm = ARMS[name]
    counted = Counters(0, 0, 0, 0, 0, drafts, 5 * drafts, drafts, (drafts, 0, 0, 0, 0))
    counters = counted if arm.draft and drafts else NOTHING
    return Outcome(name, answers, counters, 1.0, arm.temperature, arm.draft is not None)


def test_an_arm_within_one_combined_standard_error_agrees():
    off = outcome("off", 96)
    near, far = outcome("dspark-5", 94), outcome("dspark-7", 92)
    error = math.hypot(off.score().stderr, near.score().stderr)
    assert 0.02 < error < 0.04
    assert [c.holds for c in checks([off, near, far])] == [True, True, True, False]
    assert checks([off, far])[1].what == (
        "dspark-7: accuracy 0.0400 from that of off, at most one combined standard error of 0.0336"
    )


def test_a_draft_that_ignores_the_temperature_is_found():
    off = outcome("off", 96)
    warm = outcome("dspark-t1", 92, "other")
    deaf = outcome("dspark-t1", 96)
    half = replace(warm, answers=warm.answers[:50] + off.answers[50:])
    for arm, holds in ((warm, True), (half, False), (deaf, False)):
        *_, last = checks([off, arm])
        assert last.holds == holds
    assert "0 of 100 texts differ from off" in checks([off, deaf])[-1].what
    assert "50 of 100" in checks([off, half])[-1].what


def test_a_warm_arm_may_be_less_accurate():
    made = checks([outcome("off", 96), outcome("dspark-t1", 60, "other")])
    assert all(check.holds for check in made)


def test_an_arm_that_drafted_nothing_is_found():
    made = checks([outcome("off", 96), outcome("mtp", 96, drafts=0)])
    assert next((c.what, c.holds) for c in made) == ("mtp: 0 drafts", False)


def test_the_table_has_a_row_an_arm(live):
    served = replace(live[1], arm="off")
    other = replace(
        served,
        arm="dspark-5",
        answers=tuple(replace(a, text="?") for a in served.answers[:3])
        + served.answers[3:],
    )
    header, _, first, second = table([served, other]).splitlines()
    cells = [cell.strip() for cell in header.strip("|").split("|")]
    row = dict(zip(cells, map(str.strip, second.strip("|").split("|")), strict=True))
    assert row.pop("seconds").isdigit()
    assert row == {
        "arm": "dspark-5",
        "strict": "0.625 ± 0.183",
        "flexible": "0.875 ± 0.125",
        "text": "0.750 ± 0.250",
        "template": "0.500 ± 0.289",
        "tokens a step": "2.50",
        "accepted by position": "1.00 0.50",
        "texts unlike off's": "3 of 8",
    }
    assert first.split("|")[-3].strip() == "–"


# ------------------------------------------------------------------------------------------------- the command


def command(*arguments):
    app = typer.Typer()
    app.command()(evaluate)
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_a_url_is_measured_as_it_is_served(data, tmp_path):
    with answering(solved) as fake:
        done = command(fake.url, "--data", data, "--num-fewshot", 0, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert "as-served" in done.stdout
    assert fake.bodies[0]["prompt"].count("Question:") == 1
    report = json.loads((tmp_path / "results.json").read_text())
    (arm,) = report["arms"]
    assert (arm["strict"]["value"], arm["strict"]["n"]) == (0.625, 8)
    assert arm["acceptance"] == {
        "length": 2.5,
        "rate": 0.75,
        "by_position": [1, 0.5],
        "admitted": None,
        "calibration_error": [],
    }
    assert arm["by_split"]["text"]["value"] == 0.75
    samples = (tmp_path / "as-served.samples.jsonl").read_text().splitlines()
    assert json.loads(samples[1])["text"] == " So 2000."
    assert (tmp_path / "table.md").read_text() == done.stdout


@pytest.mark.parametrize("obeys", [True, False])
def test_a_draft_that_ignores_the_temperature_makes_the_command_fail(
    data, tmp_path, monkeypatch, obeys
):
    def answer(body):
        return solved(body) + (" or so" if obeys and body["temperature"] else "")

    started = []

    def server(model, name, arm, flags, out):
        started.append([model, name, *arm.flags, *flags])
        return LiveServer(fake.url)

    monkeypatch.setattr("atom_vllm_bridge.cli.eval._server", server)
    arguments = ["DIR", "--mtp-model", "MTP", "--data", data, "--out", tmp_path]
    with answering(answer) as fake:
        done = command(*arguments, "--num-fewshot", 0, "--", "--dtype", "float32")
    assert done.exit_code == (0 if obeys else 1), done.output
    n, verdict = (8, "holds") if obeys else (0, "FAILS")
    assert f"- {verdict}: dspark-t1: {n} of 8 texts differ from off" in done.stdout
    assert done.stdout.count("FAILS") == (0 if obeys else 1)
    configs = {name: flags[1] for _, name, *flags in started if len(flags) > 4}
    served = ["--max-model-len", "4096", "--dtype", "float32"]
    assert [name for _, name, *_ in started] == list(ARMS)
    assert all(arm[-4:] == served for arm in started)
    assert [arm[0] for arm in started] == ["DIR"] * 5 + ["MTP"]
    assert {name: json.loads(config) for name, config in configs.items()} == {
        "dspark-5": {"method": "dspark", "num_speculative_tokens": 5},
        "dspark-7": {"method": "dspark", "num_speculative_tokens": 7},
        "adaptive-7": {
            "method": "dspark",
            "num_speculative_tokens": 7,
            "enable_adaptive_verification": True,
        },
        "dspark-t1": {"method": "dspark", "num_speculative_tokens": 5},
        "mtp": {"method": "mtp", "num_speculative_tokens": 1},
    }


def test_what_was_measured_stands_if_a_later_arm_fails(data, tmp_path, monkeypatch):
    def server(model, name, arm, flags, out):
        return LiveServer("http://127.0.0.1:9" if name == "dspark-7" else fake.url)

    monkeypatch.setattr("atom_vllm_bridge.cli.eval._server", server)
    with answering(solved) as fake:
        done = command("DIR", "--data", data, "--num-fewshot", 0, "--out", tmp_path)
    assert done.exit_code == 1
    assert "127.0.0.1:9" in done.stderr.splitlines()[-1]
    report = json.loads((tmp_path / "results.json").read_text())
    assert [arm["arm"] for arm in report["arms"]] == ["off", "dspark-5"]
    page = (tmp_path / "table.md").read_text()
    assert page.count("0.625 ± 0.183") == 2
    assert "- mtp is left out" in page


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["DIR", "--arms", "off,fast"], "no arm fast; there are off, dspark-5,"),
        (["DIR", "--arms", "mtp"], "mtp is left out: MTP and DSpark drafts are in"),
        (["http://127.0.0.1:9"], "http://127.0.0.1:9/v1/models does not answer"),
        (
            ["http://127.0.0.1:9", "--", "--dtype", "float32"],
            "what stands after -- is not taken here: http://127.0.0.1:9 runs already.",
        ),
        (
            ["http://127.0.0.1:9", "--arms", "off"],
            "--arms is not taken here: http://127.0.0.1:9 runs already. Leave it out.",
        ),
        (
            ["--catalog", "x.json", "--num-fewshot", "0"],
            "--num-fewshot is not taken here: a case of the catalog says it. Leave it out.",
        ),
        (
            ["DIR", "--case", "one"],
            "--case is not taken here: there is no --catalog. Leave it out.",
        ),
        (
            ["DIR", "--", "--speculative-config", "{}"],
            "--speculative-config is each arm's own. Leave it out,",
        ),
        (["DIR", "--data", "."], "schoolbook_test.jsonl is not there. Name the folder"),
        (["--catalog", "no-such-file"], "no-such-file"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    data, tmp_path, arguments, line
):
    if "--catalog" not in arguments and "--data" not in arguments:
        arguments = ["--data", data, *arguments]
    done = command("--out", tmp_path, *arguments)
    assert done.exit_code == 1
    refusal = done.stderr.splitlines()[-1]
    assert refusal.startswith("atom-vllm-bridge: ")
    assert line in refusal


def test_a_model_and_a_catalog_are_not_both_taken(tmp_path):
    assert command("--out", tmp_path).exit_code == 2
    assert command("DIR", "--catalog", "x", "--out", tmp_path).exit_code == 2


def test_a_server_that_ends_shows_the_end_of_its_log(tmp_path, monkeypatch):
    log = tmp_path / "log"
    server = Server("no-such-model", log=log)
    code = "print('first'); print('the reason'); raise SystemExit(3)"
    server.command = [sys.executable, "-c", code]
    with pytest.raises(ServerError) as raised, server:
        pytest.fail("it started")
    assert str(raised.value).splitlines() == [
        "first",
        "the reason",
        f"The server ended with status 3: {log}",
    ]


TERMINATED = """
import sys
from atom_vllm_bridge import cli
from atom_vllm_bridge.cli import eval as command
from atom_vllm_bridge.measure.server import Server

def server(model, name, arm, flags, out):
    made = Server(model, log=out / "log")
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(120)"
    made.command = [sys.executable, "-c", code]
    return made

command._server = server
sys.argv = ["atom-vllm-bridge", "eval", "DIR", "--out", sys.argv[1]]
cli.main()
"""


def test_a_command_that_is_terminated_stops_its_server(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", TERMINATED, str(tmp_path)])
    log, deadline = tmp_path / "log", time.monotonic() + 120
    while not (log.exists() and log.read_text().endswith("\n")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)


def test_counters_of_two_engines_are_added_up_and_subtracted():
    one = Counters(1, 2, 3, 4, 5, 10, 20, 6, (4.0, 2.0))
    assert one - replace(NOTHING) == one
    assert one - one == replace(NOTHING, accepted_by_position=(0.0, 0.0))
    budget = replace(one, verified={"admitted": (5.0, 1.0)})
    assert (budget - one).verified == {"admitted": (5.0, 1.0)}
    assert (budget - budget).verified == {"admitted": (0.0, 0.0)}
    assert NOTHING.acceptance_length is None
    assert NOTHING.acceptance_by_position == ()
