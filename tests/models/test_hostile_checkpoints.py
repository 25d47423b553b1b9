"""Whatever a checkpoint's files hold, they are read, or refused in one line, and cost no more memory than they are long."""

import ast
import contextlib
import json
import os
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atom_vllm_bridge.models.deepseek_v4 import checkpoint, shards
from atom_vllm_bridge.models.deepseek_v4.checkpoint import CheckpointError
from atom_vllm_bridge.models.deepseek_v4.config import DeepseekV4Config
from atom_vllm_bridge.models.deepseek_v4.dspark import DSparkConfig
from atom_vllm_bridge.models.deepseek_v4.loading import iterate

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "atom_vllm_bridge"
CONFIG = json.loads((PACKAGE / "checkpoint/schoolbook/config.json").read_text())
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
TELLING = ("attn.wq_a.weight", "attn.wo_a.weight", "ffn.experts.0.w1.weight")
FEW_MIB = 4 << 20

fuzz = settings(max_examples=50, deadline=None, derandomize=True, database=None)


@contextlib.contextmanager
def refusing():
    """Let the block succeed, or refuse in lines that say something; all else is a crash."""
    error = None
    try:
        yield
    except ValueError as refusal:
        error = refusal
    if isinstance(error, CheckpointError):
        assert all(line.isprintable() and len(line) > 20 for line in error.problems)
    elif error is not None:
        # Python's own messages would not say which key is meant.
        assert type(error) is ValueError
        assert str(error).startswith("config: ")
        assert str(error).isprintable()
        assert len(str(error)) < 400


def shard(header: object, data: bytes = b"") -> bytes:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(content).to_bytes(8, "little") + content + data


def entry(shape=(2,), offsets=(0, 8), dtype="F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def read_all(directory: Path) -> list[str]:
    """The names of a checkpoint that everything here takes; what it refuses is raised."""
    found = shards.check_shards(directory)
    assert list(found) == [name for name, _ in iterate(directory, progress=False)]
    checkpoint.count_stages(found)
    layout = checkpoint.detect_layout(found)
    checkpoint.check_headers(checkpoint.tensor_table(CONFIG, layout, stages=0), found)
    return list(found)


def put(content: bytes, index: object = None) -> None:
    """Have a directory of one shard, and an index if given, read or refused, cheaply."""
    with TemporaryDirectory() as name:
        directory = Path(name)
        (directory / SINGLE).write_bytes(content)
        if index is not None:
            text = index if isinstance(index, bytes) else json.dumps(index).encode()
            (directory / INDEX).write_bytes(text)
        tracemalloc.start()
        try:
            with refusing():
                read_all(directory)
            assert tracemalloc.get_traced_memory()[1] < FEW_MIB
        finally:
            tracemalloc.stop()


def problem_of(directory: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        shards.check_shards(directory)
    with pytest.raises(CheckpointError):
        next(iterate(directory, progress=False))
    (problem,) = error.value.problems
    return problem


# Values

HUGE = (2**31, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 10**400)
DEEP = b"[" * 100_000 + b"]" * 100_000
integers = st.sampled_from([*HUGE, *(-n for n in HUGE)]) | st.integers(-9, 300)
TEXTS = ("", "0", "F32", "\n", "\0", "\ud800", "../a", "/etc/passwd", "x" * 5000)
texts = st.sampled_from(TEXTS) | st.text(max_size=4)
floats = st.sampled_from([0.0, -1.5, 4.0, 1e-320, 1e308]) | st.floats()
scalars = st.none() | st.booleans() | integers | floats | texts
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3)
    ),
    max_leaves=5,
)

# Headers of shards

NAMES = [f"layers.0.{name}" for name in TELLING]
WHOLE = shard(
    {name: entry(offsets=(8 * i, 8 * i + 8)) for i, name in enumerate(NAMES)}
    | {"mtp.0.norm.weight": entry((), (24, 26), "BF16"), "__metadata__": {"a": "b"}},
    bytes(26),
)


def test_the_shard_that_is_broken_below_is_whole(tmp_path):
    (tmp_path / SINGLE).write_bytes(WHOLE)
    assert len(shards.check_shards(tmp_path)) == 4
    assert sum(t.nbytes for _, t in iterate(tmp_path, progress=False)) == 26
    with pytest.raises(CheckpointError, match=r"embed\.weight is missing, expected"):
        read_all(tmp_path)


def test_a_shard_cut_at_any_byte_is_truncated(tmp_path):
    for length in range(len(WHOLE)):
        (tmp_path / SINGLE).write_bytes(WHOLE[:length])
        assert problem_of(tmp_path).startswith(f"{SINGLE} is truncated: {length} bytes")


@pytest.mark.parametrize("length", [2**31, 2**40, 2**62, 2**63, 2**64 - 1])
def test_a_header_longer_than_its_file_is_refused_unread(tmp_path, length):
    (tmp_path / SINGLE).write_bytes(length.to_bytes(8, "little") + WHOLE[8:])
    tracemalloc.start()
    assert f"do not hold its header of {length}" in problem_of(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_file_of_holes_gets_no_memory_for_its_header_or_index(tmp_path):
    terabyte = 1 << 40
    (tmp_path / SINGLE).write_bytes((terabyte - 8).to_bytes(8, "little"))
    os.truncate(tmp_path / SINGLE, terabyte)
    tracemalloc.start()
    assert problem_of(tmp_path).startswith(f"{SINGLE} has a header of {terabyte - 8} ")
    (tmp_path / INDEX).touch()
    os.truncate(tmp_path / INDEX, terabyte)
    assert "is not an index (ValueError: longer than" in problem_of(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@fuzz
@given(st.integers(0, len(WHOLE) - 1), st.binary(min_size=1, max_size=9))
def test_bytes_overwritten_anywhere_do_not_crash(at, content):
    put(WHOLE[:at] + content + WHOLE[at + len(content) :])


@fuzz
@given(st.binary(max_size=40) | values)
@example(DEEP)
@example(b'{"a": ' * 50_000)
@example(b'{"a": ' + b"9" * 5000 + b"}")
@example(b"\xff\xfe{\0}\0")
@example(b"")
def test_headers_of_any_content_do_not_crash(header):
    put(shard(header))


shapes = st.lists(integers | values, max_size=4) | values
offsets = st.lists(integers | values, max_size=3) | values
dtypes = st.sampled_from(sorted(checkpoint.BYTES)) | values
entries = st.fixed_dictionaries(
    {}, optional={"dtype": dtypes, "shape": shapes, "data_offsets": offsets}
)


@fuzz
@given(st.dictionaries(st.sampled_from(NAMES) | texts, entries | values, max_size=3))
@example({"a": entry((2**62, 2**62, 0), (0, 0))})
@example({"a": entry((1,) * 1000)})
@example({"a": entry(((2**63 - 1),) * 2000)})
@example({"a": entry((-1, -2))})
@example({"a": entry("12")})
@example({"a": entry((True, 2.0))})
@example({"a": entry((2**61,), (0, 2**63))})
@example({"a": entry(dtype=["F32"])})
@example({"a": entry(dtype="F32\n")})
@example({"a": entry(offsets=(0, 8, 16))})
@example({"a\nb": entry()})
@example({"a": entry(), "b": entry()})
def test_entries_of_any_content_do_not_crash(header):
    put(shard(header, bytes(8)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((0, 8), (0, 8)),
        ((0, 8), (4, 12)),
        ((0, 8), (16, 24)),
        ((8, 16), (16, 24)),
        ((0, 8), (2**62, 2**62 + 8)),
    ],
    ids=["same", "overlap", "gap", "late", "beyond"],
)
def test_tensors_that_do_not_lie_end_to_end_are_refused(tmp_path, one, other):
    header = {"a": entry(offsets=one), "b": entry(offsets=other)}
    (tmp_path / SINGLE).write_bytes(shard(header, bytes(16)))
    assert "begins at byte" in problem_of(tmp_path)


@pytest.mark.parametrize("span", [(8, 0), (0, 7), (0, 2**62)])
def test_a_place_of_another_size_than_the_shape_is_refused(tmp_path, span):
    (tmp_path / SINGLE).write_bytes(shard({"a": entry(offsets=span)}, bytes(8)))
    size = span[1] - span[0]
    assert problem_of(tmp_path).startswith(f"a is F32 [2], which is not {size} bytes")


@pytest.mark.parametrize("name", ["mtp.x.a", "mtp.-1.a", "mtp..a", "mtp.1_0.a"])
def test_a_stage_that_is_no_number_is_named(name):
    with pytest.raises(CheckpointError, match="is of no draft stage"):
        checkpoint.count_stages({"mtp.0.a": None, name: None})


@fuzz
@given(st.lists(st.one_of(texts, st.integers().map(str)), max_size=4))
@example(["9" * 5000])
def test_stages_of_any_name_do_not_crash(stages):
    with refusing():
        names = {f"mtp.{stage}.norm.weight" for stage in stages if stage.isprintable()}
        assert checkpoint.count_stages(dict.fromkeys(names)) <= len(stages)


# The index


@fuzz
@given(
    values
    | st.fixed_dictionaries(
        {"weight_map": values | st.dictionaries(texts, texts | values, max_size=3)}
    )
)
@example(DEEP)
@example(b"\xff")
@example({"weight_map": {}})
@example({"weight_map": {"a": "x" * 255}})
@example({"weight_map": {"a": "x" * 256}})
@example({"weight_map": {"a": ".."}})
def test_indexes_of_any_content_do_not_crash(index):
    put(WHOLE, index)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "a/b", "..", "", "a\\b", "a\0", 3]
)
def test_an_index_that_leads_out_of_its_directory_is_refused(tmp_path, name):
    outside = tmp_path / SINGLE
    outside.write_bytes(shard({"a": entry()}, bytes(8)))
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    (directory / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    assert "is not the name of a file beside it" in problem_of(directory)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["directory", "pipe"])
def test_a_shard_that_is_no_file_is_missing(tmp_path, make):
    make(tmp_path / SINGLE)
    assert problem_of(tmp_path).startswith(f"{SINGLE} is missing from ")


# Config


def read_config(config: object) -> None:
    tracemalloc.start()
    try:
        for read in (
            DeepseekV4Config.from_hf,
            DSparkConfig.from_hf,
            checkpoint.tensor_table,
        ):
            if isinstance(config, dict) or read is not checkpoint.tensor_table:
                with refusing():
                    read(config)
        if isinstance(config, dict):
            assert checkpoint.draft_kind(config) in ("dspark", "mtp", None)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < FEW_MIB


OPTIONAL = [
    *("partial_rotary_factor", "layer_types", "mlp_layer_types", "compress_rates"),
    *("rope_parameters", "n_mtp_layers", "num_nextn_predict_layers", "vision_n_layers"),
    *("use_index_cache", "enable_confidence_head"),
]
UNREAD = {"architectures", "quantization_config", "transformers_version", "torch_dtype"}
UNREAD |= {"bos_token_id", "eos_token_id", "initializer_range", "use_cache"}
UNREAD |= {"attention_dropout", "expert_dtype", "topk_method", "model_type"}
READ = sorted({*CONFIG, *OPTIONAL} - UNREAD)
ABSENT = object()


def changed(key: str, value: object) -> dict:
    config = CONFIG | {key: value}
    return {k: v for k, v in config.items() if v is not ABSENT}


SINGLE_VALUES = [
    *(ABSENT, None, True, False, 0, 1, -1, -8, 0.0, 4.0, 2.5, -0.5),
    *(2**31, 2**62, 2**64, 10**400, float("nan"), float("inf"), -float("inf"), 1e-320),
    *("", "8", "4\n", "x" * 5000, [], [0], [[]], [None], ["a"], [0] * 9, [True] * 9),
    *([4.0] * 9, [2**62] * 9, {}, {"a": 1}, {"type": 3}, {"compress": {}}),
]


@pytest.mark.parametrize("key", READ)
def test_a_key_of_any_value_does_not_crash(key):
    for value in SINGLE_VALUES:
        read_config(changed(key, value))


@fuzz
@given(st.dictionaries(st.sampled_from(READ), values, min_size=1, max_size=4))
def test_keys_of_any_values_do_not_crash(changes):
    read_config(CONFIG | changes)


SCALING = ("type", "rope_type", "factor", "original_max_position_embeddings")
SCALING += ("beta_fast", "beta_slow", "rope_theta", "main", "compress")


@fuzz
@given(st.dictionaries(st.sampled_from(SCALING), values), st.booleans())
@example({"type": "yarn"}, False)
@example({"main": [1], "type": "yarn"}, True)
def test_rope_scaling_of_any_content_does_not_crash(scaling, nested):
    scaling = {"type": "yarn", "factor": 4} | scaling
    scaling = {"compress": scaling, "main": scaling.get("main")} if nested else scaling
    read_config(CONFIG | {"rope_scaling": scaling})


@pytest.mark.parametrize("config", [None, [], [1], "", "config", 3, True, {}], ids=repr)
def test_a_config_that_is_no_object_is_refused(config):
    for read in (DeepseekV4Config.from_hf, DSparkConfig.from_hf):
        with pytest.raises(ValueError, match=r"^config: .+(not an object|is missing)"):
            read(config)


def test_the_config_that_is_broken_above_is_whole():
    assert DeepseekV4Config.from_hf(CONFIG).num_hidden_layers == 6
    assert DSparkConfig.from_hf(CONFIG).target_layer_ids == (3, 4, 5)


# Pickles, which run what they hold


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_a_directory_of_pickles_is_refused_unread(tmp_path, name):
    (tmp_path / name).write_bytes(b"cos\n_exit\n(I1\ntR.")
    assert problem_of(tmp_path) == (
        f"{tmp_path} holds pickled weights ({name!r}), which are never read, and no {INDEX} or {SINGLE}: "
        "give a checkpoint in safetensors."
    )


UNPICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve"}


def unpicklers(source: str) -> set[str]:
    """The modules and functions that a source names by which pickles are read."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= UNPICKLERS & {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".")[0]
            found |= UNPICKLERS & {module}
            if module in ("torch", "numpy") and "load" in {a.name for a in node.names}:
                found.add(f"{module}.load")
        elif isinstance(node, ast.Attribute) and node.attr == "load":
            owner = ast.unparse(node.value)
            if owner in ("torch", "np", "numpy", "torch.serialization"):
                found.add(f"{owner}.load")
    return found


def test_no_module_of_the_package_reads_pickles():
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 50
    assert {f: u for f in files if (u := unpicklers(f.read_text("utf-8")))} == {}


def test_reading_of_pickles_would_be_seen():
    source = "import pickle as p, json\nfrom torch import load\nx = torch.load(y)\njson.load(y)"
    assert unpicklers(source) == {"pickle", "torch.load"}
