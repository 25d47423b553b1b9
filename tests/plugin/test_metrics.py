"""The series beside vLLM's: what is counted, and that it arrives where /metrics is answered."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import prompt, running
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families
from servers import NAME, serving
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_cache_interface import CircularBufferSpec, MLAAttentionSpec

from atom_vllm_bridge import metrics
from atom_vllm_bridge.patches import registry

DOCS = Path(__file__).resolve().parents[2] / "docs"
WINDOW = 100


class Ring(CircularBufferSpec):
    """A ring that a prefix hit does not restore."""

    @property
    def prefix_replay_tokens(self) -> int:
        return WINDOW


COMMON = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
PAGED = MLAAttentionSpec(block_size=128, **COMMON)
RING = Ring(block_size=128, **COMMON)


def series(page: bytes | str, name: str) -> dict[tuple[str, ...], float]:
    """Samples of one series by the values of their labels."""
    text = page if isinstance(page, str) else page.decode()
    return {
        tuple(sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where this process's values go, as with several API servers."""
    monkeypatch.setenv(metrics.VLLMS_FOLDER, str(tmp_path))
    return tmp_path


def answer(folder: Path) -> bytes:
    pages = CollectorRegistry()
    MultiProcessCollector(pages, str(folder))
    return generate_latest(pages)


def requests(*specs: Any, caching: bool = True, rank: int = 0) -> metrics.Requests:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(rank=rank, world_size=2, data_parallel_index=3),
        model_config=SimpleNamespace(served_model_name="v4"),
        cache_config=SimpleNamespace(enable_prefix_caching=caching),
    )
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    return metrics.Requests(config, SimpleNamespace(kv_cache_groups=groups))


def request(id: str, computed: int = 0, replay: int = 0) -> NewRequestData:
    """As the scheduler sends one that found `computed` tokens, and is to compute `replay` of them again."""
    start = computed - replay
    return NewRequestData(
        id, [], [], None, None, ([],), start, None, replay_start=replay and start
    )


def batch(**tokens: int) -> SimpleNamespace:
    return SimpleNamespace(
        req_ids=list(tokens), num_scheduled_tokens=list(tokens.values())
    )


def names(page: bytes) -> set[str]:
    return {
        sample.name
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def test_paged_state_counts_hits_and_shows_nothing_that_it_cannot_feed(folder):
    counted = requests(PAGED)
    hits = "atom_bridge:prefix_hit_tokens_total"
    assert names(answer(folder)) == {hits}
    assert series(answer(folder), hits) == {("3", "v4"): 0}
    counted.added(request("a"))
    counted.added(request("b", computed=256))
    counted.added(request("c", computed=128))
    counted.stepped(batch(a=5, b=7))
    counted.removed("b")
    counted.removed("never there")
    assert names(answer(folder)) == {hits}
    assert series(answer(folder), hits) == {("3", "v4"): 384}


def test_without_prefix_caching_there_is_nothing_to_count(folder):
    requests(PAGED, caching=False)
    assert names(answer(folder)) == set()


def test_other_ranks_of_an_engine_count_nothing(folder):
    counted = requests(PAGED, RING, rank=1)
    counted.added(request("a", computed=256))
    assert names(answer(folder)) == set()


def test_a_ring_counts_what_is_rolled_back_and_computed_again(folder):
    def now(name: str) -> float:
        (value,) = series(answer(folder), f"atom_bridge:{name}").values()
        return value

    counted = requests(PAGED, RING)
    assert (now("rolled_back_tokens_total"), now("replayed_tokens_total")) == (0, 0)
    assert now("ring_slots_in_use") == 0
    counted.added(request("cold"))
    counted.added(request("hit", computed=384, replay=WINDOW))
    counted.added(request("gone", computed=256, replay=WINDOW))
    assert now("prefix_hit_tokens_total") == 384 + 256
    assert now("rolled_back_tokens_total") == 2 * WINDOW
    assert now("replayed_tokens_total") == 0
    assert now("ring_slots_in_use") == 3
    # A chunk that ends within the window, one that passes its end, and one after it.
    counted.stepped(batch(cold=20, hit=60, gone=1))
    assert now("replayed_tokens_total") == 61
    counted.removed("gone")
    counted.stepped(batch(cold=20, hit=60))
    counted.stepped(batch(cold=1, hit=60))
    assert now("replayed_tokens_total") == 1 + WINDOW
    assert now("ring_slots_in_use") == 2
    # A hit whose ring came along is not set back.
    counted.added(request("whole", computed=384))
    assert now("rolled_back_tokens_total") == 2 * WINDOW
    assert now("prefix_hit_tokens_total") == 384 + 256 + 384


def test_every_series_that_is_documented_can_appear(folder):
    counted = requests(PAGED, RING)
    counted.verified([[9, 9], [6, 3], [4.5, 1.5], [5, 1]], budget=7)
    registry.load().apply("override-grid")
    metrics.show_patches()
    assert names(answer(folder)) == {one.sample for one in metrics.SERIES}


def test_drafts_are_counted_by_position(folder):
    counted = requests(PAGED)
    counted.verified([[9, 9], [6, 3], [4.5, 1.5], [5, 1]], budget=7)
    counted.verified([[1, 1], [1, 0], [0.5, 0], [1, 0]], budget=2)
    page = answer(folder)
    (label,) = {labels[:-1] for labels in series(page, metrics.ADMITTED.sample)}
    for one, sums in (
        (metrics.OFFERED, (10, 10)),
        (metrics.ADMITTED, (7, 3)),
        (metrics.EXPECTED, (5, 1.5)),
        (metrics.KEPT, (6, 1)),
    ):
        found = series(page, one.sample)
        assert found == {(*label, str(i)): value for i, value in enumerate(sums)}
    assert set(series(page, metrics.DRAFT_BUDGET.name).values()) == {2}


def test_values_of_several_processes_are_added_up(folder):
    code = """
        from atom_vllm_bridge import metrics
        metrics.values().add(metrics.PREFIX_HITS, 7, ("v4", "{}"))
        metrics.values().set(metrics.PATCH_STATE, 1, ("early-look", "applied"))
    """
    code = "\n".join(line.strip() for line in code.splitlines())
    for engine in (0, 1, 1):
        subprocess.run([sys.executable, "-c", code.format(engine)], check=True)
    page = answer(folder)
    hits = series(page, "atom_bridge:prefix_hit_tokens_total")
    assert hits == {("0", "v4"): 7, ("1", "v4"): 14}
    states = series(page, "atom_bridge:patch_state")
    assert states == {("early-look", "applied"): 1}


def test_where_no_folder_is_shared_nothing_is_counted(monkeypatch):
    monkeypatch.delenv(metrics.VLLMS_FOLDER, raising=False)
    monkeypatch.setenv(metrics.FOLDER, "/no/such/folder")
    counted = requests(PAGED)
    counted.added(request("a", computed=128))
    metrics.show_patches()


OFFER = """
import os, subprocess, sys
from prometheus_client import REGISTRY, generate_latest
from atom_vllm_bridge import metrics
from atom_vllm_bridge.patches import registry
registry.load().turn_off(["override-grid"])  # which imports no vLLM
registry.load().apply("override-grid")
metrics.offer()
metrics.offer()
own = os.environ[metrics.FOLDER]
if len(sys.argv) > 1:
    assert own != sys.argv[1], "another server's"
values = "from atom_vllm_bridge import metrics as m; m.values().add(m.PREFIX_HITS, 5, ('v4', '0'))"
subprocess.run([sys.executable, "-c", values], check=True)
page = generate_latest(REGISTRY).decode()
assert page.count("atom_bridge:prefix_hit_tokens_total{") == 1, page
assert page.count("atom_bridge:patch_state{") == 1, page
print(own)
"""


def test_a_folder_is_made_for_each_server_and_goes_with_it():
    variables = {k: v for k, v in os.environ.items() if k != metrics.VLLMS_FOLDER}
    done = subprocess.run(
        [sys.executable, "-c", OFFER], env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    own = done.stdout.strip()
    assert not Path(own).exists()


def test_what_another_program_left_in_the_environment_is_not_taken(tmp_path):
    variables = {k: v for k, v in os.environ.items() if k != metrics.VLLMS_FOLDER}
    done = subprocess.run(
        [sys.executable, "-c", OFFER, str(tmp_path)],
        env=variables | {metrics.FOLDER: str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_page_in_docs_is_the_generated_one():
    page = (DOCS / "metrics.md").read_text(encoding="utf-8")
    assert page == metrics.metrics_page()
    assert all(f"`{one.sample}`" in page for one in metrics.SERIES)


def test_a_request_in_an_engine_is_counted_with_its_hit(small_checkpoint, folder):
    with running(small_checkpoint) as engine:
        hits = "atom_bridge:prefix_hit_tokens_total"
        label = ("0", str(small_checkpoint))
        assert series(answer(folder), hits) == {label: 0}
        first, second = (engine.generate([prompt(300)])[0] for _ in range(2))
        assert (first.cached, second.cached) == (0, 256)
        assert series(answer(folder), hits) == {label: 256}
        assert engine.counter("vllm:prefix_cache_hits") == 256


# A hit is set back by one window, 128 tokens.
RINGS = """'{"atom": {"state_layout": "ring", "prefix_rollback": "window"}}'"""


@pytest.fixture(scope="module")
def server(tiny_checkpoint, tmp_path_factory):
    log = tmp_path_factory.mktemp("serve") / "log"
    options = "--max-model-len 1024 --max-num-seqs 4 --kv-cache-memory-bytes 256M --disable-log-stats"
    with serving(
        tiny_checkpoint, log, f"{options} --additional-config {RINGS}"
    ) as server:
        yield server


def test_a_server_answers_with_all_of_them_though_vllm_keeps_no_statistics(server):
    tokens = prompt(300)
    for _ in range(2):
        server.complete(tokens, 2)
    assert server.series("vllm:prefix_cache_hits_total") == {}
    for name, value in (
        ("prefix_hit_tokens_total", 256),
        ("rolled_back_tokens_total", 128),
        ("replayed_tokens_total", 128),
    ):
        assert server.series(f"atom_bridge:{name}", "model_name") == {NAME: value}
        assert server.series(f"atom_bridge:{name}", "engine") == {"0": value}
    # Patches of the API server and of the worker, each once.
    assert server.series("atom_bridge:patch_state", "patch") == dict.fromkeys(
        ("draft-length", "early-look", "kernel-scan", "override-grid"), 1
    )
    assert server.series("atom_bridge:patch_state", "state") == {"applied": 4}


def test_a_ring_is_in_use_while_its_request_runs(server):
    with server.client.completions.create(
        model=NAME,
        prompt="Hello",
        max_tokens=200,
        stream=True,
        extra_body={"ignore_eos": True},
    ) as stream:
        next(iter(stream))
        assert server.metric("atom_bridge:ring_slots_in_use") == 1
        for _ in stream:
            pass
    # A worker hears of an end with the step after it.
    deadline = time.monotonic() + 30
    while server.metric("atom_bridge:ring_slots_in_use"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
