"""`atom-vllm-bridge bench`: what it asks, what it makes of the answers, and one real point."""

import json
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from atom_vllm_bridge.cli.bench import bench
from atom_vllm_bridge.measure.plot import figure_of
from atom_vllm_bridge.measure.server import Counters
from atom_vllm_bridge.measure.speed import (
    Acceptance,
    BenchError,
    Client,
    Point,
    Verification,
    arms_of,
    fault_of,
    point_of,
)
from atom_vllm_bridge.measure.speed_report import Report, verdict, write_report
from atom_vllm_bridge.measure.workload import (
    PRESETS,
    WorkloadError,
    workload_of,
    write_prompts,
)

# What `vllm bench serve` writes, as far as it is read; two requests, one warm-up before them.
RESULT = {
    "completed": 2,
    "failed": 0,
    "duration": 2.0,
    "total_input_tokens": 30,
    "total_output_tokens": 64,
    "output_throughput": 32.0,
    "input_lens": [10, 20],
    "output_lens": [32, 32],
    "errors": ["", ""],
    **{
        f"p{p}_{name}_ms": base + p
        for name, base in (("ttft", 100), ("itl", 200), ("tpot", 0))
        for p in (50, 90, 99)
    },
    "spec_decode_acceptance_length": 2.5,
    "spec_decode_per_position_acceptance_rates": [0.9, 0.4, 0.2],
}
COUNTED = Counters(
    prompt_tokens=40,
    generation_tokens=96,
    prefix_queries=40,
    prefix_hits=10,
    preemptions=0,
    drafts=25,
    drafted=75,
    accepted=37,
    accepted_by_position=(22, 10, 5),
)


@pytest.fixture
def prompts(tmp_path):
    """A folder as the package's own, with three lines a kind."""
    folder = tmp_path / "prompts"
    folder.mkdir()
    for kind in ("prose", "problems"):
        lines = [json.dumps({"prompt": f"{kind} {i}", "seed": i}) for i in range(3)]
        (folder / f"{kind}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def points() -> list[Point]:
    """Three arms at 1 and 4, in the order of measurement."""
    base = point_of("off", 1, 12.25, RESULT, COUNTED, {})
    plain = replace(base, acceptance=None)
    kinds = {"prose": Acceptance(2.0, (0.6, 0.4)), "problems": Acceptance(3.0, (1, 1))}
    return [
        replace(plain, output_tokens_per_s=100.0),
        replace(base, arm="dspark", output_tokens_per_s=182.0),
        replace(base, arm="mtp", output_tokens_per_s=98.0),
        replace(plain, concurrency=4, output_tokens_per_s=300.0),
        replace(
            base,
            arm="dspark",
            concurrency=4,
            output_tokens_per_s=270.0,
            acceptance_by_kind=kinds,
        ),
        replace(base, arm="mtp", concurrency=4, output_tokens_per_s=210.0),
    ]


def row(page: str, *cells: str) -> list[str]:
    """The first row of a table in Markdown that begins with these cells."""
    rows = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in page.split("\n")
    )
    return next(found for found in rows if found[: len(cells)] == list(cells))


def test_the_random_preset_is_the_published_command():
    preset = PRESETS["random-512-1024"]
    for users, requests, warmups in ((16, 160, 16), (128, 1024, 128)):
        assert preset.requests(users) == requests
        flags = preset.client_flags(users, requests, None, preset.warmups(users))
        published = (
            "--dataset-name random --random-input-len 512 --random-output-len 1024 --temperature 0 --ignore-eos "
            f"--max-concurrency {users} --num-prompts {requests} --num-warmups {warmups}"
        )
        assert sorted(flags) == sorted(published.split())
    assert not preset.fit_for_acceptance


def test_the_speed_preset_is_the_published_method(tmp_path):
    preset = PRESETS["speed"]
    assert preset.concurrency == (256, 128, 64, 32, 16, 8, 4)
    assert {preset.requests(users) for users in preset.concurrency} == {880}
    assert (preset.warmup_runs, preset.warmups(256)) == (2, 0)
    flags = preset.client_flags(256, 880, tmp_path / "880.jsonl", 0)
    options = dict(zip(flags[::2], flags[1::2], strict=False))
    assert (options["--temperature"], options["--top-p"]) == ("1", "1")
    assert options["--custom-output-len"] == "2048"
    assert "--ignore-eos" not in flags


def test_the_frozen_preset_asks_greedily_for_128_tokens_each(tmp_path):
    preset = PRESETS["frozen"]
    assert preset.concurrency == (1, 4, 16, 64)
    assert [preset.requests(users) for users in preset.concurrency] == [24, 24, 64, 256]
    flags = preset.client_flags(4, 24, tmp_path / "24.jsonl", 4)
    text = " ".join(flags)
    assert "--temperature 0 --ignore-eos --dataset-name custom" in text
    assert "--custom-output-len 128 --disable-shuffle --skip-chat-template" in text


def test_what_is_changed_from_a_preset_is_told():
    changed = workload_of("frozen", concurrency=[2], num_prompts=6, output_len=16)
    assert changed.differs == (
        "concurrency 2 instead of 1, 4, 16, 64",
        "6 requests a point instead of 24",
        "16 output tokens instead of 128",
    )
    same = workload_of("speed", num_prompts=880, output_len=2048)
    assert same.differs == ()


def test_requests_that_never_reach_the_concurrency_are_refused():
    with pytest.raises(WorkloadError, match="raise --num-prompts to 64"):
        workload_of("frozen", concurrency=[4, 16], num_prompts=8)


def test_prose_and_problems_take_turns_and_begin_again(prompts, tmp_path):
    def asked(kind, requests):
        path = write_prompts(kind, requests, tmp_path, prompts)
        return [json.loads(line) for line in path.read_text().splitlines()]

    mixed = [line["prompt"] for line in asked("mixed", 7)]
    assert mixed == [
        *("prose 0", "problems 0", "prose 1", "problems 1", "prose 2", "problems 2"),
        "prose 0",
    ]
    assert asked("problems", 2) == [{"prompt": "problems 0"}, {"prompt": "problems 1"}]


def test_more_requests_than_prompts_are_told(prompts):
    few = workload_of("frozen", concurrency=[1], num_prompts=6)
    many = workload_of("frozen", concurrency=[1], num_prompts=7)
    assert few.caveats(prompts) == []
    assert many.caveats(prompts)[0].startswith("7 requests ask 6 prompts")


def test_arms_differ_in_their_draft_alone_and_mtp_needs_its_own_checkpoint():
    arms, notes = arms_of(["off", "dspark", "mtp"], "target", None, 7)
    assert [(arm.name, arm.model) for arm in arms] == [
        ("off", "target"),
        ("dspark", "target"),
    ]
    assert json.loads(arms[1].flags[1]) == {
        "method": "dspark",
        "num_speculative_tokens": 7,
    }
    assert notes[0] == "DSpark drafts 7 tokens a step."
    assert "--mtp-model" in notes[1]
    arms, notes = arms_of(["dspark", "mtp"], "target", "other", None)
    assert [arm.model for arm in arms] == ["target", "other"]
    assert json.loads(arms[0].flags[1]) == {"method": "dspark"}
    assert json.loads(arms[1].flags[1])["method"] == "mtp"
    assert notes == ["MTP drafts 1 token a step, from `other`."]


def test_arms_of_seven_drafts_differ_in_who_verifies_them():
    (fixed, adaptive), _ = arms_of(["dspark-7", "adaptive-7"], "target", None, 3)
    seven = {"method": "dspark", "num_speculative_tokens": 7}
    assert json.loads(fixed.flags[1]) == seven
    assert json.loads(adaptive.flags[1]) == {
        **seven,
        "enable_adaptive_verification": True,
    }


def test_what_a_budget_did_is_told_by_position():
    verified = {
        "offered": (40.0, 40.0, 20.0),
        "admitted": (40.0, 10.0, 0.0),
        "expected": (30.0, 2.0, 0.0),
        "kept": (34.0, 3.0, 0.0),
    }
    counted = replace(COUNTED, verified=verified)
    assert counted.admitted_rate == 0.5
    assert counted.calibration_error == (0.1, 0.1)
    adaptive = point_of("adaptive-7", 4, 1.0, RESULT, counted, {})
    assert adaptive.verification == Verification(
        0.5, expected=(0.75, 0.2, 0.0), kept=(0.85, 0.3, 0.0)
    )
    off = point_of("off", 4, 1.0, RESULT, COUNTED, {})
    assert off.verification is None
    page = Report("m", "frozen", "asked", points=[off, adaptive]).markdown()
    row = "| adaptive K ≤ 7 | 4             | 0.50       | 0.75 / 0.85 | 0.20 / 0.30 | 0.00 / 0.00 |"
    assert " ".join(row.split()) in " ".join(page.split())


def test_client_and_server_count_warmups_as_the_first_request():
    assert fault_of(RESULT, COUNTED, warmups=1) is None
    fault = fault_of(RESULT, COUNTED, warmups=0)
    assert "the client counts 64 output tokens and the server 96" in fault
    longer = replace(COUNTED, prompt_tokens=41)
    fault = fault_of(RESULT, longer, warmups=1)
    assert "the client counts 40 prompt tokens and the server 41" in fault


def test_a_preemption_voids_a_point_and_the_line_says_what_to_raise():
    fault = fault_of(RESULT, replace(COUNTED, preemptions=3), warmups=1)
    assert fault.startswith("3 preemptions")
    assert "--kv-cache-memory-bytes" in fault
    assert "\n" not in fault


def test_a_point_holds_the_clients_figures_and_the_servers_hits():
    point = point_of("dspark", 2, 12.5, RESULT, COUNTED, {})
    assert (point.requests, point.startup_s, point.output_tokens) == (2, 12.5, 64)
    assert point.output_tokens_per_s == 32.0
    # 50 ms a token at the median.
    assert point.user_tokens_per_s == 20.0
    assert point.ttft_ms == {"p50": 150, "p90": 190, "p99": 199}
    assert point.inter_token_ms == {"p50": 250, "p90": 290, "p99": 299}
    assert point.prefix_hits == 0.25
    assert point.acceptance == Acceptance(2.5, (0.9, 0.4, 0.2))


@dataclass(frozen=True)
class Recorded(Client):
    """A client that answers from a record, and notes what was asked."""

    result: Any = None
    asked: list[tuple] = field(default_factory=list)

    def run(self, name, kind, requests, warmups=0):
        self.asked.append((name, kind, requests, warmups))
        return self.result


class Once:
    """A server before and after a point."""

    def __init__(self):
        self.pages = iter([COUNTED - COUNTED, COUNTED])

    def metrics(self):
        return next(self.pages)


def recorded(arm, out, preset="frozen", result=RESULT) -> Recorded:
    workload = workload_of(preset, concurrency=[1], num_prompts=10)
    arm = arms_of([arm], "target", None, None)[0][0]
    return Recorded(Once(), arm, 1, workload, out, out, result=result)


@pytest.mark.parametrize("preset", ["frozen", "random-512-1024"])
def test_prose_and_problems_are_asked_alone_where_acceptance_means_something(
    preset, tmp_path
):
    client = recorded("dspark", tmp_path, preset)
    point = client.point(1.0, by_kind=True)
    alone = [("prose", "prose", 5, 0), ("problems", "problems", 5, 0)]
    expected = alone if preset == "frozen" else []
    assert client.asked == [("measured", "mixed", 10, 1), *expected]
    assert list(point.acceptance_by_kind) == [name for name, *_ in expected]


def test_a_draft_arm_that_drafts_nothing_is_an_error(tmp_path):
    silent = {key: RESULT[key] for key in RESULT if not key.startswith("spec_decode")}
    nothing = "dspark at concurrency 1: nothing was drafted"
    with pytest.raises(BenchError, match=nothing):
        recorded("dspark", tmp_path, result=silent).point(1.0, by_kind=False)
    off = recorded("off", tmp_path, result=silent).point(1.0, by_kind=False)
    assert off.acceptance is None


@pytest.mark.parametrize(
    ("ratios", "sentence"),
    [
        (
            {1: 1.8, 4: 1.1},
            "DSpark pays at every measured concurrency: 1.80 × at 1, 1.10 × at 4.",
        ),
        (
            {1: 0.9, 4: 0.5},
            "DSpark pays at no measured concurrency: 0.90 × at 1, 0.50 × at 4.",
        ),
        (
            {1: 1.8, 4: 1.2, 16: 0.9, 64: 0.7},
            "DSpark stops paying at concurrency 16: 1.80 × at 1, 1.20 × at 4, 0.90 × at 16, 0.70 × at 64.",
        ),
        (
            {1: 0.8, 4: 1.2, 16: 0.9},
            "DSpark pays at concurrency 4 and not at 1, 16, so no one concurrency divides them: "
            "0.80 × at 1, 1.20 × at 4, 0.90 × at 16.",
        ),
        (
            {1: 1.3, 4: 0.98},
            "DSpark stops paying at concurrency 4: 1.30 × at 1, 0.98 × at 4; at 4 the difference may be noise.",
        ),
    ],
)
def test_the_sentence_says_where_a_draft_stops_paying(ratios, sentence):
    assert verdict("DSpark", ratios) == sentence


def test_the_page_holds_the_figures_of_every_point():
    report = Report("target", "frozen", "prose and problems", points=points())
    page = report.markdown()
    assert row(page, "off", "1") == ["off", "1", "2", "100.0", "", "20.0", "12.2"]
    assert row(page, "DSpark", "4")[3:5] == ["270.0", "0.90 ×"]
    assert row(page, "MTP", "4")[3:5] == ["210.0", "0.70 ×"]
    latency = page.split("## Latency")[1]
    assert row(latency, "DSpark", "1")[2] == "150.0 / 190.0 / 199.0"
    acceptance = page.split("## Acceptance")[1]
    assert row(acceptance, "DSpark", "4", "all")[3:] == ["2.50", "0.90", "0.40", "0.20"]
    alone = row(acceptance, "DSpark", "4", "prose alone")
    assert alone[3:] == ["2.00", "0.60", "0.40", ""]
    assert "**DSpark stops paying at concurrency 4: 1.82 × at 1, 0.90 × at 4.**" in page
    assert "**MTP pays at no measured concurrency: 0.98 × at 1, 0.70 × at 4; " in page
    assert "Unfit" not in page


def test_what_a_reader_must_know_stands_in_the_page():
    report = Report(
        *("target", "random-512-1024", "random prompts"),
        serve_flags=["--dtype", "float32"],
        fit_for_acceptance=False,
        differs=["concurrency 2 instead of 16, 128"],
        notes=["MTP is left out."],
        points=points()[:2],
    )
    page = report.markdown()
    assert "Unfit for acceptance figures" in page.split("## Acceptance")[1]
    assert "Differs from the preset: concurrency 2 instead of 16, 128." in page
    assert "MTP is left out." in page
    assert "`--dtype float32`" in page


def test_json_and_picture_hold_the_same_points(tmp_path):
    report = Report("target", "frozen", "prose", points=points())
    write_report(report, tmp_path)
    found = json.loads((tmp_path / "bench.json").read_text())
    assert [p["output_tokens_per_s"] for p in found["points"]] == [
        *(100.0, 182.0, 98.0),
        *(300.0, 270.0, 210.0),
    ]
    assert found["points"][4]["acceptance_by_kind"]["problems"]["length"] == 3.0
    assert found["times_off"] == {
        "dspark": {"1": 1.82, "4": 0.9},
        "mtp": {"1": 0.98, "4": 0.7},
    }
    assert found["verdicts"] == report.sentences()
    assert (tmp_path / "bench.md").read_text() == report.markdown()
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    everyone, one = figure_of(points(), "target").axes
    drawn = {line.get_label(): list(line.get_ydata()) for line in everyone.lines}
    assert drawn == {"off": [100, 300], "DSpark": [182, 270], "MTP": [98, 210]}
    assert [list(line.get_xdata()) for line in one.lines] == [[1, 4]] * 3


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--arms", "off,eagle"],
            "'eagle' is none of off, dspark, dspark-7, adaptive-7, mtp",
        ),
        (["--concurrency", "1,many"], "whole numbers with commas"),
        (["--num-prompts", "8"], "raise --num-prompts to 64"),
        (["--", "--speculative-config", "{}"], "choose with --arms"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(arguments, line):
    app = typer.Typer()
    app.command()(bench)
    done = CliRunner().invoke(app, ["target", *arguments])
    assert done.exit_code == 1
    assert line in done.stderr
    assert done.stderr.startswith("atom-vllm-bridge: ")
    assert done.stderr.count("\n") == 1
