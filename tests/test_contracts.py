"""What the bridge asks of vLLM is there, in the installed release and in those that are kept; what is not is named."""

import textwrap
import zipfile
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from atom_vllm_bridge import compat
from atom_vllm_bridge.compat import SUPPORTED
from contracts import matrix, record, table
from contracts.__main__ import installed
from contracts.record import (
    Kept,
    Recorder,
    as_text,
    faults,
    kept,
    lost,
    version_of,
)
from contracts.sources import Sources
from contracts.uses import Module

KEPT = kept()
OLDEST, *_, NEWEST = KEPT


@pytest.mark.parametrize("release", KEPT, ids=lambda release: release.version)
def test_all_that_is_asked_of_vllm_is_there(release):
    assert faults(release) == []


def test_what_is_kept_of_the_installed_vllm_is_what_it_answers_to_what_is_asked_today():
    sources = Sources(installed())
    recorder = Recorder(sources.ask)
    assert faults(recorder) == []
    version = version_of(sources)
    (same,) = [release for release in KEPT if release.version == version]
    assert as_text(version, recorder.answers) == same.path.read_text()


def test_every_release_that_is_supported_is_kept_and_in_the_table():
    minors = {".".join(release.version.split(".")[:2]) for release in KEPT}
    assert minors == {
        f"0.{n}" for n in range(30, 40) if f"0.{n}.0" in SpecifierSet(SUPPORTED)
    }
    listed = {row["vllm"] for row in matrix.rows()}
    assert listed == {release.version for release in KEPT}
    assert all(Version(version) in SpecifierSet(SUPPORTED) for version in listed)


def test_the_table_in_the_readme_is_made_from_the_file():
    text = matrix.README.read_text(encoding="utf-8")
    assert matrix.with_matrix(text) == text
    for row in matrix.rows():
        assert row["what ran"] in text


RENAMED = [
    "vllm.v1.worker.gpu.model_states.default:DefaultModelState",
    "vllm.v1.kv_cache_interface:CircularBufferSpec",
    "vllm.config.compilation:CUDAGraphMode.without_piecewise",
    "vllm.config.scheduler:SchedulerConfig.max_num_batched_tokens",
    "vllm.v1.core.sched.output:NewRequestData.replay_start",
    "vllm.v1.worker.gpu.input_batch:InputBatch.cu_num_logits",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.adaptive_verification",
    "vllm.v1.worker.gpu.model_states.interface:ModelState.prepare_attn",
    "vllm.v1.kv_cache_layout:KVCacheLayout.BLHNC",
    "vllm.envs:VLLM_USE_V2_MODEL_RUNNER",
    "vllm.v1.worker.gpu.spec_decode.dspark.speculator?self.model",
]


@pytest.fixture
def release():
    """A copy of what is kept, to be spoilt."""
    return Kept(NEWEST.path)


@pytest.mark.parametrize("question", RENAMED)
def test_a_rename_is_caught_by_name(release, question):
    assert release.answers[question]
    release.answers[question] = None
    assert [line for line in faults(release) if question in line]


def test_a_method_that_we_override_and_nobody_calls_any_more_is_caught_by_name(release):
    assert lost(release.answers, OLDEST.answers) == []
    hook = "vllm.v1.kv_cache_interface:SlidingWindowMLASpec.prefix_cacheable"
    release.answers[hook] = None
    assert lost(release.answers, OLDEST.answers) == [f"{hook} is not there any more."]


@pytest.mark.parametrize("release", KEPT, ids=lambda release: release.version)
def test_the_planner_is_found_where_each_release_has_it(release, monkeypatch):
    modules = {
        question.partition(":")[0]
        for place in table.PROBED
        for question in place
        if release.answers[question]
    }
    monkeypatch.setattr(
        compat, "find_spec", lambda name: name if name in modules else None
    )
    monkeypatch.setattr(compat, "import_module", lambda name: name)
    assert {compat.cache_planner()} == modules


def test_what_compat_looks_for_is_in_one_of_its_places(release):
    for place in table.PROBED[0]:
        release.answers[place] = None
    (line,) = faults(release)
    assert line.startswith(f"vLLM has none of {table.PROBED[0][0]}, ")


def spoilt(release: Kept, question: str, old: str, new: str) -> list[str]:
    answer = release.answers[question]
    assert old in answer["call"]
    release.answers[question] = answer | {"call": answer["call"].replace(old, new)}
    return faults(release)


def test_a_parameter_of_a_method_that_we_override_is_caught_by_name(release):
    base = "vllm.v1.worker.gpu.model_states.default:DefaultModelState"
    line, *_ = spoilt(release, f"{base}.add_request", "new_req_data", "request")
    assert "model_state" in line
    assert "add_request" in line
    assert "request is missing" in line


def test_a_parameter_that_we_pass_is_caught_by_name(release):
    spec = "vllm.v1.kv_cache_interface:MLAAttentionSpec()"
    (line,) = spoilt(release, spec, "tokens_per_state", "tokens_per_row")
    assert line.startswith("atom_vllm_bridge.kv_cache:")
    assert "unexpected keyword argument 'tokens_per_state'" in line


def test_a_parameter_that_vllm_requires_anew_is_caught_by_name(release):
    (line,) = spoilt(release, "vllm.v1.utils:CpuGpuBuffer()", "dtype,", "dtype, node,")
    assert line.startswith("atom_vllm_bridge.verification:")
    assert "missing a required argument: 'node'" in line


def test_what_vllm_asks_of_our_models_anew_is_caught_by_name(release):
    question = "vllm.v1.worker.gpu.spec_decode.dspark.speculator?self.model"
    asked = release.answers[question]["asked"]
    asked["compute_confidence"] = ["2, temperature"]
    asked["draft_all"] = ["1"]
    new, changed = faults(release)
    assert "compute_confidence" in changed
    assert "temperature" in changed
    assert "AtomDSparkDraftModel has no draft_all" in new


def test_a_changed_body_of_a_patched_function_is_caught_by_the_patchs_name(release):
    question = "vllm.triton_utils.dispatcher:KernelOverride.__getitem__#source"
    release.answers[question] = "0" * 16
    (line,) = faults(release)
    assert line.startswith("patch override-grid: ")


def test_a_new_need_says_that_answers_are_to_be_recorded(release):
    del release.answers["vllm.sequence:IntermediateTensors"]
    assert all("record the answers again" in line for line in faults(release))


@pytest.fixture(params=["folder", "wheel"])
def small(request, tmp_path):
    """A vLLM of few lines."""
    files = {
        "vllm/__init__.py": "",
        "vllm/_version.py": "__version__ = version = '9.8.7+cpu'\n",
        "vllm/parts/__init__.py": "from .one import Config as Settings\n",
        "vllm/parts/one.py": """
            from dataclasses import dataclass
            from typing import ClassVar, TYPE_CHECKING
            if TYPE_CHECKING:
                from vllm.parts.two import Inner

            @dataclass
            class Base:
                size: int
                kind: ClassVar[str] = "x"

            @dataclass(kw_only=True)
            class Config(Base):
                inner: "Inner | None" = None
                many: list["Inner"]

                def step(self, count, *, fast=False) -> "Inner": ...
            """,
        "vllm/parts/two.py": """
            class Inner:
                def __init__(self, width):
                    self.width = width
                @property
                def area(self): return 1
            """,
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    if request.param == "folder":
        return Sources(tmp_path)
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        for name in files:
            archive.write(tmp_path / name, name)
    return Sources(tmp_path / "a.whl")


def test_sources_answer_through_imports_bases_and_annotations(small):
    assert version_of(small) == "9.8.7"
    config = "vllm.parts:Settings"
    assert small.ask(config) == {"is": "class", "at": "vllm.parts.one:Config"}
    assert small.ask(f"{config}()") == {"call": "(size, *, inner=..., many)"}
    inner = {"is": "value", "type": "vllm.parts.two:Inner"}
    assert small.ask(f"{config}.inner") == inner
    assert small.ask(f"{config}.many") == inner | {"type": "[]vllm.parts.two:Inner"}
    assert small.ask(f"{config}.size") == {"is": "value"}
    assert small.ask(f"{config}.step")["call"] == "(self, count, *, fast=...)"
    assert small.ask("vllm.parts.two:Inner.width") == {"is": "value"}
    assert small.ask("vllm.parts.two:Inner.height") is None
    assert small.ask("vllm.parts.three:") is None


@pytest.mark.parametrize(
    ("code", "missing"),
    [
        ("x.inner.width", ""),
        ("x.inner.height", "vLLM has no vllm.parts.two:Inner.height"),
        ("[i.depth for i in x.many]", "vLLM has no vllm.parts.two:Inner.depth"),
        ("x.step(1, fast=True).area", ""),
        ("x.step(1, slow=True)", "unexpected keyword argument 'slow'"),
        ("x.step(1).volume", "vLLM has no vllm.parts.two:Inner.volume"),
        ("y, z = x.inner, 1; y.length", "vLLM has no vllm.parts.two:Inner.length"),
        ("Settings(1, many=[], colour=2)", "unexpected keyword argument 'colour'"),
        ("'vllm.parts.two.Inner'", ""),
        ("'vllm.parts.two.Outer'", "vLLM has no vllm.parts.two.Outer"),
        ("x.length if isinstance(x, str) else 0", ""),
    ],
)
def test_uses_are_followed_through_attributes_calls_and_loops(small, code, missing):
    text = (
        f"from vllm.parts import Settings\ndef f(x: 'Settings | None'):\n    {code}\n"
    )
    found = Module("ours", text, small.ask).faults()
    if missing:
        assert any(missing in line for line in found)
        assert all(line.startswith("ours:3: ") for line in found)
    else:
        assert found == []


def test_a_place_without_a_vllm_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no vLLM"):
        Sources(tmp_path)


def test_every_file_of_ours_is_walked():
    package = Path(record.__file__).parents[1] / "atom_vllm_bridge"
    assert len(record.our_files()) == len(list(package.rglob("*.py"))) > 100
