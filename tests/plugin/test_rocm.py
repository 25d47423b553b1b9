"""AMD GPUs, simulated: the platform alone and beside ROCm/ATOM, graph modes, and the variables of the published commands."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import simulated_rocm
import torch
from published import COMMANDS, adaptive_command

from atom_vllm_bridge import engine_ops, plugin, rocm_atom, startup
from atom_vllm_bridge.cli.doctor import engine, installation
from atom_vllm_bridge.cli.doctor.asking import Answer
from atom_vllm_bridge.cli.doctor.report import Report
from atom_vllm_bridge.models.ops import registry
from atom_vllm_bridge.models.ops.registry import Provider
from atom_vllm_bridge.platforms import rocm_variables
from atom_vllm_bridge.platforms.refusal import Refused
from atom_vllm_bridge.settings import Settings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "amd.md"
OURS = {
    "DeepseekV4ForCausalLM": "atom_vllm_bridge.target",
    "DSparkDraftModel": "atom_vllm_bridge.dspark",
    "DeepSeekV4MTPModel": "atom_vllm_bridge.mtp",
}
ATOMS = "atom.plugin.vllm.model_wrapper"
# ATOM's plugin has no DSpark draft of DeepSeek-V4.
OF_ATOM = dict.fromkeys(OURS, ATOMS) | {
    "DSparkDraftModel": "vllm.models.deepseek_v4",
    "Qwen3ForCausalLM": ATOMS,
}
ATOM_PLATFORM = "atom.plugin.vllm.platform.ATOMPlatform"
OUR_PLATFORM = "atom_vllm_bridge.platforms.rocm.AtomRocmPlatform"
VLLMS_QWEN = "vllm.model_executor.models.qwen3"
WORKER = "atom_vllm_bridge.workers.rocm.AtomRocmWorker"

DSPARK = """--speculative-config '{"method":"dspark"}'"""
DSPARK_ENVIRONMENT = COMMANDS["DSpark"].environment
# checkpoint, options, environment
ASKED = {
    "MTP": ("mtp", COMMANDS["MTP"].text, COMMANDS["MTP"].environment),
    "DSpark": ("dspark", COMMANDS["DSpark"].text, DSPARK_ENVIRONMENT),
    "adaptive": ("dspark", adaptive_command(), DSPARK_ENVIRONMENT),
    "method alone": ("dspark", DSPARK, {}),
    "piecewise": (
        "dspark",
        """--compilation-config '{"cudagraph_mode":"PIECEWISE"}'""",
        {},
    ),
    "worker": ("dspark", "--worker-cls elsewhere.Worker", {}),
    "runner V1": ("dspark", DSPARK, {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    "misspelt": ("dspark", DSPARK, {"AITER_USE_CK_MOE_SORTING": "true"}),
}
# Where ATOM's distribution lies on sys.path, and what else differs.
NEIGHBOURS = {
    "ATOM first": ("first", {}),
    "ATOM last": ("last", {"arguments": {"worker": True}}),
    "disabled, ATOM first": ("first", {"environment": {"ATOM_BRIDGE_DISABLE": "1"}}),
    "disabled, ATOM last": ("last", {"environment": {"ATOM_BRIDGE_DISABLE": "1"}}),
    "ATOM turned off": ("last", {"environment": {rocm_atom.OFF: "1"}}),
    "ATOM broken": ("first", {"broken": "atom.plugin.vllm.register"}),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory, small_dspark, small_mtp):
    """All that is asked, at once: what is slow to import is imported once."""
    folder = tmp_path_factory.mktemp("rocm")
    qwen = folder / "qwen"
    qwen.mkdir()
    (qwen / "config.json").write_text(
        json.dumps({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"})
    )
    checkpoints = {"dspark": str(small_dspark), "mtp": str(small_mtp)}
    gpus, atom = map(str, simulated_rocm.lay_out(folder))
    questions = {
        name: {
            "name": "who_serves",
            "first": [gpus, atom] if where == "first" else [gpus],
            "last": [atom] if where == "last" else [],
            **rest,
        }
        for name, (where, rest) in NEIGHBOURS.items()
    }
    questions["beside"] = {
        "name": "who_configures",
        "first": [gpus],
        "last": [atom],
        "arguments": {
            "checkpoints": {"dspark": str(small_dspark), "qwen": str(qwen)},
            "options": "--skip-tokenizer-init --max-model-len 512",
        },
    }
    questions["commands"] = {
        "name": "what_became",
        "first": [gpus],
        "arguments": {"checkpoints": checkpoints, "asked": list(ASKED.values())},
    }
    found = simulated_rocm.ask(*questions.values())
    return dict(zip(questions, found, strict=True))


@pytest.fixture(scope="module")
def became(answers):
    return dict(zip(ASKED, answers["commands"]["became"], strict=True))


# ------------------------------------------------------------------------------------------------ beside ROCm/ATOM


@pytest.mark.parametrize("order", ["ATOM first", "ATOM last"])
def test_the_platform_is_atoms_and_deepseek_v4_the_bridges_in_either_order(
    answers, order
):
    found = answers[order]
    ours, atoms = (found["order"].index(n) for n in ("atom_bridge", "atom_model_registry"))  # fmt: skip
    assert (atoms < ours) == (order == "ATOM first")
    assert found["chosen"] == ATOM_PLATFORM
    assert found["kinds"][:2] == ["AtomBesidePlatform", "AtomOnRocm"]
    assert found["kinds"][3:5] == ["ATOMPlatform", "RocmPlatform"]
    assert found["classes"] == OURS | {"Qwen3ForCausalLM": ATOMS}


@pytest.mark.parametrize("order", ["disabled, ATOM first", "disabled, ATOM last"])
def test_disabled_it_leaves_everything_to_atom(answers, order):
    found = answers[order]
    assert found["chosen"] == ATOM_PLATFORM
    assert found["kinds"][:2] == ["ATOMPlatform", "RocmPlatform"]
    assert found["classes"] == OF_ATOM


def test_an_atom_that_is_turned_off_is_as_if_it_were_not_there(answers):
    found = answers["ATOM turned off"]
    assert found["chosen"] == OUR_PLATFORM
    assert found["classes"] == OURS | {"Qwen3ForCausalLM": VLLMS_QWEN}


def test_where_atoms_plugin_cannot_be_loaded_the_bridge_serves_on_vllms_platform(
    answers,
):
    found = answers["ATOM broken"]
    assert found["chosen"] == "vllm.platforms.rocm.RocmPlatform"
    assert found["kinds"][0] == "AtomRocmPlatform"
    assert found["classes"] == OURS | {"Qwen3ForCausalLM": VLLMS_QWEN}


def test_one_line_says_what_is_whose(answers):
    for order in ("ATOM first", "ATOM last"):
        (line,) = answers[order]["said"]
        assert line == (
            "ROCm/ATOM is installed and the platform, ATOMPlatform, left to it: DeepSeek-V4 with its MTP and DSpark drafts is "
            "atom-vllm-bridge's unless the setting model is atom, every other model as without it. ATOM_BRIDGE_DISABLE=1 leaves "
            "all to ATOM."
        )
    assert answers["ATOM turned off"]["said"] == []


def test_beside_atom_deepseek_v4_is_configured_by_the_bridge_alone(answers):
    """ATOM's own would take blocks off every prefix hit."""
    found = answers["beside"]
    assert found["seen"] == ["Qwen3ForCausalLM"]
    assert found["became"]["dspark"]["graphs"] == "FULL_DECODE_ONLY"
    assert found["became"]["dspark"]["mode"] == "NONE"
    assert found["became"]["dspark"]["worker"] == WORKER


def test_beside_atom_another_model_is_atoms(answers):
    became = answers["beside"]["became"]["qwen"]
    assert became["mode"] == "VLLM_COMPILE"
    assert became["graphs"] == "FULL_AND_PIECEWISE"
    assert became["worker"] == "vllm.v1.worker.gpu_worker.Worker"


def entry_point(monkeypatch, value):
    point = SimpleNamespace(name="atom", value=value)
    monkeypatch.setattr(rocm_atom.metadata, "entry_points", lambda group: [point])


@pytest.mark.parametrize(
    ("value", "environment", "found"),
    [
        ("atom.plugin.vllm.register:register_platform", {}, "atom"),
        ("atom.plugin.vllm.register:register_platform", {rocm_atom.OFF: "0"}, "atom"),
        ("atom.plugin.vllm.register:register_platform", {rocm_atom.OFF: "1"}, None),
        ("atom.plugin.vllm.register:register_platform", {"VLLM_PLUGINS": "atom_bridge"}, None),
        ("atom.plugin.vllm.register:register_platform", {"VLLM_PLUGINS": "x,atom"}, "atom"),
        ("atom.visualisation:platform", {}, None),
    ],
)  # fmt: skip
def test_atom_is_known_by_its_entry_point_and_whether_vllm_loads_it(
    monkeypatch, value, environment, found
):
    entry_point(monkeypatch, value)
    assert rocm_atom.platform_plugin(environment) == found


def test_atom_beside_a_vllm_without_amd_gpus_is_named_with_the_way_out(
    monkeypatch, caplog
):
    entry_point(monkeypatch, "atom.plugin.vllm.register:register_platform")
    monkeypatch.setattr(plugin.logger, "propagate", True)
    monkeypatch.setattr(plugin.logger.parent, "propagate", True)
    with caplog.at_level("ERROR"):
        assert plugin.register_platform() is None
    lines = {record.getMessage() for record in caplog.records}
    (line,) = lines
    assert line.startswith("ROCm/ATOM's plugin brings a platform for AMD GPUs")
    assert "CpuPlatform" in line
    assert f"set {rocm_atom.OFF}=1" in line


def test_doctor_finds_no_fault_in_atom_beside_the_bridge(monkeypatch):
    """Another plugin that brings a platform is one."""
    report = Report()
    points = [
        SimpleNamespace(name=name, value=value, dist=None)
        for name, value in (
            ("atom_bridge", "atom_vllm_bridge.plugin:register_platform"),
            ("atom", "atom.plugin.vllm.register:register_platform"),
            ("other", "other.plugin:platform"),
        )
    ]
    monkeypatch.setattr(installation.metadata, "entry_points", lambda group: points)
    installation.entry_points(report, {})
    (fault,) = report.faults
    assert "platform plugin other" in fault
    report = Report()
    found = {"chosen": ATOM_PLATFORM, "stock": plugin.ROCM, "enum": "ROCM"}
    answer = {"ours": None, "left_to": "atom", "refusal": None} | found
    engine.platform(report, Answer(answer), Settings(), {})
    assert report.faults == []
    assert report.sections["platform"] == {
        "chosen": ATOM_PLATFORM,
        "enum": "ROCM",
        "why": "the plugin leaves it to atom of ROCm/ATOM, and keeps DeepSeek-V4",
    }


# ---------------------------------------------------------------------------------------------- published commands


@pytest.mark.parametrize("which", ["MTP", "DSpark", "adaptive", "method alone"])
def test_a_published_command_is_accepted_on_amd_gpus(became, which):
    found = became[which]
    assert found["class"] == "DeepseekV4ForCausalLM"
    assert found["v2"]
    # Piecewise graphs are demoted: nothing is compiled, and there is nothing to break.
    assert found["mode"] == "NONE"
    assert found["graphs"] == "FULL_DECODE_ONLY"
    assert found["worker"] == WORKER


@pytest.mark.parametrize("which", ["MTP", "DSpark", "adaptive"])
def test_variables_of_a_published_command_reach_the_workers_as_they_are(became, which):
    assert became[which]["kept"] == ASKED[which][2]


def test_the_unified_attention_of_aiter_is_accepted_for_target_and_draft(became):
    assert became["MTP"]["attention"] == "ROCM_AITER_UNIFIED_ATTN"
    assert became["MTP"]["draft attention"] == "ROCM_AITER_UNIFIED_ATTN"
    assert became["MTP"]["asked"]["attention"] == "ROCM_AITER_UNIFIED_ATTN"


def test_experts_of_aiter_are_accepted(became):
    assert became["DSpark"]["experts"] == "aiter"
    assert became["DSpark"]["asked"]["experts"] == "--moe-backend aiter"


def test_breakable_graphs_are_off_unless_they_are_asked_for(became):
    assert became["method alone"]["breakable"] is None
    assert became["DSpark"]["breakable"] == "1"
    assert became["DSpark"]["asked"]["graph mode"] == "FULL_AND_PIECEWISE"


def test_piecewise_graphs_alone_become_none(became):
    assert became["piecewise"]["graphs"] == "NONE"


def test_a_worker_of_the_users_own_is_kept(became):
    assert became["worker"]["worker"] == "elsewhere.Worker"


def test_the_first_runner_is_refused_on_amd_gpus(became):
    assert became["runner V1"]["refused"] == (
        "atom-vllm-bridge: DeepSeek-V4 needs Model Runner V2, but VLLM_USE_V2_MODEL_RUNNER=0 is set. "
        "Unset it, or set ATOM_BRIDGE_DISABLE=1 to serve with vLLM's own model."
    )


def test_a_value_that_would_be_misread_is_refused_before_anything_starts(became):
    assert became["misspelt"]["refused"] == (
        "atom-vllm-bridge: AITER_USE_CK_MOE_SORTING=true is not honoured: aiter takes 1 for on and anything else for off. "
        "Set it to 0 or 1, or unset it."
    )


# --------------------------------------------------------------------------------------------------- the variables


@pytest.mark.parametrize("command", ["MTP", "DSpark"])
def test_every_variable_of_the_published_commands_is_known(command):
    known = {variable.name for variable in rocm_variables.VARIABLES}
    # Read by vLLM on every device.
    known |= {
        "VLLM_USE_V2_MODEL_RUNNER",
        "VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN",
    }
    assert set(COMMANDS[command].environment) <= known
    rocm_variables.refuse_what_is_not_honoured(COMMANDS[command].environment)


@pytest.mark.parametrize("variable", rocm_variables.VARIABLES, ids=lambda v: v.name)
def test_a_variable_takes_its_values_and_no_other(variable):
    for value in variable.values:
        rocm_variables.refuse_what_is_not_honoured({variable.name: value})
    rocm_variables.refuse_what_is_not_honoured({})
    for value in ("yes", "", "3"):
        with pytest.raises(Refused, match=f"{variable.name}={value} is not") as no:
            rocm_variables.refuse_what_is_not_honoured({variable.name: value})
        assert "\n" not in str(no.value)


def test_the_page_has_every_variable_with_its_values():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    for variable in rocm_variables.VARIABLES:
        (row,) = [row for row in rows if f"`{variable.name}`" in row]
        values = row.split("|")[2]
        assert set(values.replace("`", "").split()) == set(variable.values)


def test_a_sorting_policy_that_the_experts_are_not_handed_is_refused():
    with pytest.raises(Refused, match="hands no policy to aiter"):
        rocm_variables.refuse_what_is_not_honoured(
            {"VLLM_ROCM_AITER_MOE_DISPATCH_POLICY": "2"}
        )


def test_the_start_says_what_each_variable_does():
    said = startup.rows_on_rocm(
        SimpleNamespace(left_to="ATOMPlatform"),
        {"VLLM_ROCM_USE_AITER": "True", "AITER_USE_CK_MOE_SORTING": "0", "HOME": "/"},
    )
    assert said == {
        "environment": "VLLM_ROCM_USE_AITER=True (aiter's ops where they fit); AITER_USE_CK_MOE_SORTING=0 (read by aiter)",
        "platform": "ATOMPlatform of ROCm/ATOM, which serves every other model",
    }
    alone = startup.rows_on_rocm(SimpleNamespace(left_to=""), {})
    assert alone == {"environment": "none of AMD's set"}


@pytest.fixture
def aiter(monkeypatch):
    """A provider of that name, which has one op that Triton has too, on a torch for AMD GPUs."""
    monkeypatch.setattr(registry, "_providers", dict(registry._providers))
    has = {"hc_post": lambda *_: None}
    registry.register(Provider("aiter", has.get, lambda device: None))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    yield has["hc_post"]
    registry.configure("")


@pytest.mark.parametrize(
    ("value", "setting", "provider"),
    [
        (None, "", "aiter"),
        ("1", "", "aiter"),
        ("0", "", "triton"),
        ("false", "", "triton"),
        ("0", "hc_post=aiter", "aiter"),
        ("0", "torch", "torch"),
    ],
)
def test_aiter_is_used_unless_the_variable_turns_it_off(
    monkeypatch, aiter, value, setting, provider
):
    monkeypatch.delenv(rocm_variables.USE_AITER, raising=False)
    if value is not None:
        monkeypatch.setenv(rocm_variables.USE_AITER, value)
    engine_ops.configure(setting)
    registry.resolve("hc_post", "cuda")
    (choice,) = [c for c in registry.table() if c.op == "hc_post"]
    assert choice.provider == provider


def test_on_other_devices_the_variable_says_nothing(monkeypatch, aiter):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setenv(rocm_variables.USE_AITER, "0")
    engine_ops.configure("")
    assert registry.resolve("hc_post", "cuda") is aiter


# ------------------------------------------------------------------------------------------------------ the worker


@pytest.mark.parametrize(
    ("collectives", "measured"), [("tp", 0), ("dp", 0), ("none", 7)]
)
def test_graphs_are_not_captured_for_measurement_with_aiters_collectives(
    monkeypatch, collectives, measured
):
    from vllm.v1.worker.gpu_worker import Worker

    from atom_vllm_bridge.workers import rocm

    def group(name):
        of_aiter = object() if name == collectives else None
        return SimpleNamespace(
            device_communicator=SimpleNamespace(aiter_ar_comm=of_aiter)
        )

    monkeypatch.setattr(rocm.parallel_state, "get_tp_group", lambda: group("tp"))
    monkeypatch.setattr(rocm.parallel_state, "get_dp_group", lambda: group("dp"))
    monkeypatch.setattr(
        Worker,
        "determine_available_memory",
        lambda self: self.model_runner.profile_cudagraph_memory(),
    )
    worker = object.__new__(rocm.AtomRocmWorker)
    worker.model_runner = SimpleNamespace(profile_cudagraph_memory=lambda: 7)
    assert worker.determine_available_memory() == measured


def test_a_rank_without_a_group_of_several_has_no_collectives(monkeypatch):
    from atom_vllm_bridge.workers import rocm

    alone = SimpleNamespace(device_communicator=None)
    monkeypatch.setattr(rocm.parallel_state, "get_tp_group", lambda: alone)
    monkeypatch.setattr(rocm.parallel_state, "get_dp_group", lambda: alone)
    assert not rocm.has_aiter_collectives()
