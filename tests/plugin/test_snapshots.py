"""A checkpoint that is named as on a hub is found in its cache, if all of it is there."""

import json

import pytest

from atom_vllm_bridge.checkpoint.make import make
from atom_vllm_bridge.models.deepseek_v4.shards import INDEX, check_shards
from atom_vllm_bridge.snapshots import directory_of, is_name

NAME = "some-lab/tiny-v4"


@pytest.fixture
def cache(tmp_path):
    """A hub's cache as its library lays it out: files by their digest, and links to them for each commit."""
    made = make(tmp_path / "made", "tiny", "mxfp4", layers=2, tokenizer=False)
    folder = tmp_path / "cache" / f"models--{NAME.replace('/', '--')}"
    snapshot = folder / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir()
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(snapshot.name)
    for file in made.iterdir():
        blob = file.rename(folder / "blobs" / file.name)
        (snapshot / file.name).symlink_to(blob)
    return tmp_path / "cache", snapshot


def test_all_of_a_snapshot_is_checked(cache):
    folder, snapshot = cache
    found = directory_of(NAME, cache=str(folder))
    assert found == snapshot
    assert len(check_shards(found)) > 100
    assert directory_of(NAME, "0123abcd", str(folder)) == snapshot


def test_what_is_not_there_or_not_all_there_is_not_found(cache):
    folder, snapshot = cache
    assert directory_of("some-lab/other", cache=str(folder)) is None
    assert directory_of(NAME, "another-branch", str(folder)) is None
    index = json.loads((snapshot / INDEX).read_text())
    shard = snapshot / next(iter(index["weight_map"].values()))
    shard.unlink()
    assert directory_of(NAME, cache=str(folder)) is None


def test_an_index_that_is_none_is_left_to_whoever_reads_it(cache):
    folder, snapshot = cache
    (snapshot / INDEX).unlink()
    (snapshot / INDEX).write_text("[]")
    assert directory_of(NAME, cache=str(folder)) == snapshot


def test_a_directory_is_itself_and_never_a_name(tmp_path, monkeypatch):
    assert directory_of(str(tmp_path)) == tmp_path
    assert directory_of(str(tmp_path / "none")) is None
    monkeypatch.chdir(tmp_path)
    assert is_name("lab/model")
    (tmp_path / "lab" / "model").mkdir(parents=True)
    assert not is_name("lab/model")
    assert str(directory_of("lab/model")) == "lab/model"
