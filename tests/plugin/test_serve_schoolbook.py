"""The checkpoint that comes with the package, served as `make serve` does: answers, acceptance, and both ways to measure it."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
from openai import OpenAI
from typer.testing import CliRunner

import atom_vllm_bridge
from atom_vllm_bridge.cli.eval import evaluate
from atom_vllm_bridge.measure.server import Server
from atom_vllm_bridge.measure.speed import Client, arms_of
from atom_vllm_bridge.measure.workload import workload_of
from training.stories import without_beginnings

ROOT = Path(__file__).parents[2]
MEASURE = Path(atom_vllm_bridge.__file__).parent / "measure"
OPTIONS = "--max-model-len 4096 --max-num-seqs 8 --kv-cache-memory-bytes 512M --reasoning-parser deepseek_v4 --served-model-name checkpoints/schoolbook"


@pytest.fixture(scope="module")
def arm(schoolbook):
    return arms_of(["dspark"], str(schoolbook), None, None)[0][0]


@pytest.fixture(scope="module")
def server(arm, tmp_path_factory):
    log = tmp_path_factory.mktemp("serve") / "log"
    with pytest.MonkeyPatch.context() as patch:
        # The engines of other tests live in their own process; a server's does not.
        patch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
        patch.setenv("OMP_NUM_THREADS", "1")
        with Server(arm.model, [*OPTIONS.split(), *arm.flags], log=log) as server:
            yield server


@pytest.fixture(scope="module")
def client(server):
    return OpenAI(base_url=f"{server.url}/v1", api_key="none")


@pytest.fixture(scope="module")
def problem():
    """The first of those that no training text holds."""
    with (MEASURE / "tasks" / "schoolbook_test.jsonl").open() as lines:
        return json.loads(next(lines))


def test_a_word_problem_is_answered_with_its_steps(server, client, problem):
    before = server.metrics()
    answer = client.completions.create(
        model=server.model,
        prompt=f"Question: {problem['question']}\nAnswer:",
        max_tokens=128,
        temperature=0,
        stop=["\n\n"],
    )
    text = answer.choices[0].text
    assert text.startswith(" ")
    # How its sentences begin is the model's choice, and nothing else.
    text, wanted = map(without_beginnings, (text[1:], problem["answer"]))
    assert text == wanted
    counted = server.metrics() - before
    assert counted.acceptance_length >= 3.0


def test_chat_is_answered_too(server, client, problem):
    answer = client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": problem["question"]}],
        max_tokens=128,
        temperature=0,
        extra_body={"chat_template_kwargs": {"thinking": False}},
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.content.endswith(problem["answer"].splitlines()[-1])


def test_eval_asks_the_server_and_finds_it_right(server, tmp_path):
    app = typer.Typer()
    app.command()(evaluate)
    arguments = [server.url, "--limit", "8", "--num-fewshot", "2"]
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    (arm,) = json.loads((tmp_path / "results.json").read_text())["arms"]
    assert arm["strict"]["n"] == 8
    assert arm["strict"]["value"] >= 7 / 8
    assert arm["flexible"]["value"] >= arm["strict"]["value"]
    acceptance = arm["acceptance"]
    assert acceptance["length"] >= 3.0
    assert acceptance["by_position"] == sorted(acceptance["by_position"], reverse=True)
    assert len(acceptance["by_position"]) == 5
    asked = [json.loads(line) for line in (tmp_path / "as-served.samples.jsonl").open()]
    assert {sample["split"] for sample in asked} == {"text", "template"}


def test_bench_counts_what_the_server_counts(server, arm, tmp_path):
    workload = workload_of("frozen", concurrency=[2], num_prompts=6, output_len=24)
    client = Client(server, arm, 2, workload, tmp_path, MEASURE / "prompts")
    before = server.metrics()
    point = client.point(server.startup_s, by_kind=False)
    counted = server.metrics() - before
    assert point.output_tokens == 6 * 24
    # Two warm-ups, each as long as the first request.
    assert counted.generation_tokens == 8 * 24
    assert point.output_tokens_per_s == pytest.approx(6 * 24 / point.duration_s)
    assert 0 < point.ttft_ms["p50"] <= point.ttft_ms["p99"]
    assert 2.0 < point.acceptance.length < 6
    assert point.acceptance.length == pytest.approx(
        1 + sum(point.acceptance.by_position)
    )


def test_the_curl_of_the_readme_is_answered_as_shown(server):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.search(r"^\$ (curl .*?)\n(\{.*?\})\n```", readme, re.DOTALL | re.M)
    command = shlex.split(shown[1].replace("\\\n", " "))
    command[1] = command[1].replace("http://localhost:8000", server.url)
    done = subprocess.run(
        [command[0], "--silent", "--show-error", *command[1:]],
        capture_output=True,
        check=True,
        timeout=60,
    )
    answer, documented = json.loads(done.stdout), json.loads(shown[2])
    assert holds(answer, documented)


def holds(answer, documented) -> bool:
    """Whether what is documented is in the answer, which has more fields."""
    if isinstance(documented, dict):
        return all(
            key in answer and holds(answer[key], value)
            for key, value in documented.items()
        )
    if isinstance(documented, list):
        return all(map(holds, answer, documented)) and len(answer) == len(documented)
    return answer == documented
