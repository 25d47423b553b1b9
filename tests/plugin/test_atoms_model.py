"""The setting `model` = `atom` on simulated AMD GPUs: whose DeepSeek-V4 is configured, in which process, and what is refused."""

import json
import sys
from types import SimpleNamespace

import pytest
import simulated_rocm

from atom_vllm_bridge import atom_contract, rocm_atom
from atom_vllm_bridge.cli.doctor import engine
from atom_vllm_bridge.cli.doctor.asking import Answer
from atom_vllm_bridge.cli.doctor.report import Report
from atom_vllm_bridge.platforms import atoms_model
from atom_vllm_bridge.settings import MODEL, Settings

ATOMS = "atom.plugin.vllm.model_wrapper"
MOE = f"{ATOMS}:ATOMMoEForCausalLM"
TARGET, MTP, DSPARK = "DeepseekV4ForCausalLM", "DeepSeekV4MTPModel", "DSparkDraftModel"
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}


def additional(**section):
    return f"--additional-config '{json.dumps({'atom': section})}'"


def speculative(**section):
    return f"--speculative-config '{json.dumps(section)}'"


ATOM = additional(model="atom")
# checkpoint, options, environment
ASKED = {
    "nothing": ("dspark", "", {}),
    "atom": ("dspark", ATOM, V1),
    "nothing again": ("dspark", "", {}),
    "variable": ("dspark", "", V1 | {MODEL: "atom"}),
    "key over variable": ("dspark", additional(model="native"), {MODEL: "atom"}),
    "dotted": ("dspark", "--additional-config.atom.model atom", V1),
    "MTP": ("mtp", f"{ATOM} {speculative(method='mtp', num_speculative_tokens=1)}", V1),
    "MTP alone": ("mtp", f"{ATOM} {speculative(method='mtp')}", V1),
    "native MTP": ("mtp", speculative(method="mtp"), {}),
    "block fp8": ("fp8", ATOM, V1),
    "another model": ("qwen", "", {}),
    "another model, atom": ("qwen", ATOM, {}),
    "DSpark": ("dspark", f"{ATOM} {speculative(method='dspark')}", {}),
    "runner V2": ("dspark", ATOM, {}),
    "breakable": ("dspark", ATOM, V1 | {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}),
    "ring": ("dspark", additional(model="atom", state_layout="ring"), V1),
    "rollback": ("dspark", additional(model="atom", prefix_rollback="window"), V1),
    "ops": ("dspark", ATOM, V1 | {"ATOM_BRIDGE_OPS": "torch"}),
    "misspelt": ("dspark", additional(model="atm"), V1),
    "in Python": ("dspark", {"additional_config": {"atom": {"model": "atom"}}}, V1),
    "in Python, back": (
        "dspark",
        {"additional_config": {"atom": {"model": "native"}}},
        V1 | {MODEL: "atom"},
    ),
}
SHORT = ("atom", "MTP", "nothing again")
# Where ATOM's distribution lies on sys.path, what is asked, and what else differs.
NEIGHBOURS = {
    "ATOM first": ("first", tuple(ASKED), {}),
    "ATOM last": ("last", SHORT, {}),
    "ATOM turned off": (
        "first",
        ("atom", "variable"),
        {"environment": {rocm_atom.OFF: "1"}},
    ),
    "ATOM absent": ("", ("atom", "variable", "another model, atom"), {}),
    "ATOM broken": ("first", ("atom",), {"broken": "atom.plugin.vllm.register"}),
}
CHILD = {"arguments": {"worker": True}, "environment": {MODEL: "atom"}}


@pytest.fixture(scope="module")
def answers(tmp_path_factory, small_dspark, small_mtp):
    """All that is asked, at once: what is slow to import is imported once."""
    folder = tmp_path_factory.mktemp("rocm")
    qwen = folder / "qwen"
    qwen.mkdir()
    (qwen / "config.json").write_text(
        json.dumps({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"})
    )
    fp8 = folder / "fp8"
    fp8.mkdir()
    config = json.loads((small_dspark / "config.json").read_text())
    quantized = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    (fp8 / "config.json").write_text(
        json.dumps(config | {"quantization_config": quantized})
    )
    checkpoints = {
        "fp8": str(fp8),
        "dspark": str(small_dspark),
        "mtp": str(small_mtp),
        "qwen": str(qwen),
    }
    gpus, atom = map(str, simulated_rocm.lay_out(folder))
    _, renamed = simulated_rocm.lay_out(
        folder / "renamed", version="earlier", changed=("compute_logits", "logits")
    )

    def question(where, atom=atom, **rest):
        first, last = ([atom] if where == side else [] for side in ("first", "last"))
        return {"first": [gpus, *first], "last": last, **rest}

    def whose(asked):
        chosen = [ASKED[name] for name in asked]
        return {"checkpoints": checkpoints, "asked": chosen}

    questions = {
        name: question(where, name="whose_model", arguments=whose(asked), **rest)
        for name, (where, asked, rest) in NEIGHBOURS.items()
    }
    questions["ATOM renamed"] = question(
        "last", str(renamed), name="whose_model", arguments=whose(["atom"])
    )
    for where in ("first", "last"):
        questions[f"child, {where}"] = question(where, name="who_serves", **CHILD)
    found = simulated_rocm.ask(*questions.values())
    return dict(zip(questions, found, strict=True))


def became(answers, neighbour, asked):
    return answers[neighbour]["became"][NEIGHBOURS[neighbour][1].index(asked)]


def refused(answers, neighbour, asked):
    line = became(answers, neighbour, asked)["refused"]
    assert line.startswith("atom-vllm-bridge: ")
    assert "\n" not in line
    return line


# -------------------------------------------------------------------------------------------------- whose model it is


@pytest.mark.parametrize("order", ["ATOM first", "ATOM last"])
@pytest.mark.parametrize("asked", ["atom", "MTP"])
def test_deepseek_v4_and_its_mtp_draft_are_atoms_in_either_order(answers, order, asked):
    found = became(answers, order, asked)
    assert found["classes"][TARGET] == found["classes"][MTP] == ATOMS
    # ATOM's platform has prepared vLLM for it, and what vLLM knows of the class is true of ATOM's.
    assert found["configured by ATOM"] == [TARGET]
    assert found["pipelines"]
    assert not found["v2"]


def test_nothing_of_the_native_model_is_applied(answers):
    atoms, natives = (became(answers, "ATOM first", n) for n in ("atom", "nothing"))
    assert natives["worker"] == "atom_vllm_bridge.workers.rocm.AtomRocmWorker"
    assert atoms["worker"] == "vllm.v1.worker.gpu_worker.Worker"
    assert natives["mode"] == "NONE"
    assert atoms["mode"] == "VLLM_COMPILE"
    assert atoms["graphs"] == "FULL_AND_PIECEWISE"
    # The native model claims the published format for itself.
    fp8 = became(answers, "ATOM first", "block fp8")
    assert fp8.get("quantization", fp8) == "deepseek_v4_fp8"


@pytest.mark.parametrize("order", ["ATOM first", "ATOM last"])
def test_without_the_setting_it_is_native_also_after_a_command_with_it(answers, order):
    found = became(answers, order, "nothing again")
    assert found["classes"][TARGET] == "atom_vllm_bridge.target"
    assert found["classes"][MTP] == "atom_vllm_bridge.mtp"
    assert found["classes"][DSPARK] == "atom_vllm_bridge.dspark"
    assert found["configured by ATOM"] == []
    assert not found["pipelines"]


@pytest.mark.parametrize("asked", ["variable", "dotted"])
def test_other_spellings_of_the_setting_do_the_same(answers, asked):
    assert became(answers, "ATOM first", asked) == became(answers, "ATOM first", "atom")


def test_the_key_counts_over_the_variable(answers):
    found = became(answers, "ATOM first", "key over variable")
    assert found["classes"][TARGET] == "atom_vllm_bridge.target"
    assert found["inherited"] == "native"


def test_the_method_alone_takes_the_length_of_the_draft_from_the_checkpoint(answers):
    assert became(answers, "ATOM first", "MTP alone")["draft"] == 1


def test_an_mtp_draft_is_native_without_the_setting(answers):
    found = became(answers, "ATOM first", "native MTP")
    assert found["classes"][MTP] == "atom_vllm_bridge.mtp"
    assert found["v2"]


def test_other_models_are_what_they_are_without_the_setting(answers):
    plain, beside = (
        became(answers, "ATOM first", name)
        for name in ("another model", "another model, atom")
    )
    assert plain["classes"]["Qwen3ForCausalLM"] == ATOMS
    assert beside == plain | {"classes": beside["classes"], "inherited": "atom"}
    assert beside["classes"]["Qwen3ForCausalLM"] == ATOMS
    assert "refused" not in became(answers, "ATOM absent", "another model, atom")


@pytest.mark.parametrize("where", ["first", "last"])
def test_a_process_that_inherits_the_variable_resolves_the_same_classes(answers, where):
    front = became(answers, "ATOM first", "atom")
    assert front["inherited"] == "atom"
    # Ray hands it to other machines.
    assert MODEL in front["for Ray"]
    child = answers[f"child, {where}"]
    assert child["kinds"][0] == "AtomBesidePlatform"
    for architecture in (TARGET, MTP, "Qwen3ForCausalLM"):
        assert child["classes"][architecture] == ATOMS
    # ATOM has none.
    assert child["classes"][DSPARK] == "vllm.models.deepseek_v4"


def test_one_line_of_the_log_says_whose_the_model_is(answers):
    marked = "model = atom: DeepSeek-V4 is served by ROCm/ATOM's "
    log = answers["ATOM first"]["log"].splitlines()
    lines = [line.partition(marked)[2] for line in log if marked in line]
    # Once without a draft, and once with one.
    assert lines == [f"{MOE}.", f"{MOE}, {MOE}."]


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("asked", "parts"),
    [
        ("DSpark", [f"registers no {DSPARK}", "no dspark draft of DeepSeek-V4"]),
        ("runner V2", ["needs Model Runner V1", "Set VLLM_USE_V2_MODEL_RUNNER=0"]),
        ("breakable", ["VLLM_USE_BREAKABLE_CUDAGRAPH=1", "Set it to 0"]),
        ("ring", ["state_layout is a setting of the native model"]),
        ("rollback", ["prefix_rollback is a setting of the native model"]),
        ("ops", ["ops is a setting of the native model"]),
        ("misspelt", ["'atm'", "did you mean atom?", "native, atom"]),
        ("in Python", [f"Set {MODEL}=atom before vLLM is imported"]),
        ("in Python, back", [f"Set {MODEL}=native before vLLM is imported"]),
    ],
)
def test_what_atoms_model_cannot_honour_is_refused_in_one_line(answers, asked, parts):
    line = refused(answers, "ATOM first", asked)
    for part in parts:
        assert part in line


@pytest.mark.parametrize("asked", ["atom", "variable"])
def test_an_atom_that_is_not_there_is_named_with_how_it_is_installed(answers, asked):
    line = refused(answers, "ATOM absent", asked)
    assert "ROCm/ATOM is not installed. Run `pip install .` in a clone" in line
    assert "the atom of the package index is another project" in line


@pytest.mark.parametrize("asked", ["atom", "variable"])
def test_an_atom_that_is_turned_off_is_named_with_the_variable(answers, asked):
    line = refused(answers, "ATOM turned off", asked)
    assert f"{rocm_atom.OFF}=1 turns ROCm/ATOM's plugin off. Unset it" in line


def test_an_atom_whose_plugin_cannot_be_loaded_has_registered_nothing(answers):
    assert f"registers no {TARGET}" in refused(answers, "ATOM broken", "atom")


def test_an_atom_that_lacks_what_is_called_is_refused_by_the_name_of_that(answers):
    (found,) = answers["ATOM renamed"]["became"]
    assert f"has no {MOE}.compute_logits" in found["refused"]


def test_an_atom_left_out_of_vllms_plugins_is_named(monkeypatch):
    point = SimpleNamespace(name="atom", value="atom.plugin.vllm.register:x")
    monkeypatch.setattr(rocm_atom.metadata, "entry_points", lambda group: [point])
    reason = rocm_atom.absence({"VLLM_PLUGINS": "atom_bridge"})
    assert reason == "VLLM_PLUGINS leaves ROCm/ATOM's plugin out. Add atom"


def test_on_another_device_the_setting_is_refused(monkeypatch):
    from vllm import platforms

    elsewhere = SimpleNamespace(is_rocm=lambda: False)
    monkeypatch.setattr(platforms, "_current_platform", elsewhere)
    config = SimpleNamespace(device_config=SimpleNamespace(device_type="cuda"))
    with pytest.raises(RuntimeError, match="needs an AMD GPU, and vLLM runs on cuda"):
        atoms_model.refuse_what_it_cannot_honour(config, Settings(model="atom"))


# ----------------------------------------------------------------------------------------------------------- contract


@pytest.fixture
def atom_of(tmp_path, monkeypatch):
    """Makes an ATOM of published signatures, and returns what the contract finds lacking."""

    def make(version, *changed):
        for name, text in simulated_rocm.atom_files(
            version, changed or ("", "")
        ).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        return atom_contract.lack(MOE)

    def forget():
        for name in [n for n in sys.modules if n.partition(".")[0] == "atom"]:
            del sys.modules[name]
        atom_contract._tree.cache_clear()

    forget()
    yield make
    forget()


@pytest.mark.parametrize("version", ["earlier", "later"])
def test_both_published_versions_have_what_is_called(atom_of, version):
    assert atom_of(version) is None


INNER = atom_contract.MODEL


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ((":ATOMMoEForCausalLM", ":Other"), f"has no {MOE}"),
        (("load_weights", "load"), f"has no {MOE}.load_weights"),
        (("vllm_config", "config"), f"has {MOE}.__init__ without the parameter vllm_config"),
        (("input_ids, positions, i", "input_ids, places, i"), f"has {MOE}.forward without the parameter positions"),
        (("(self, weights)", "(self)"), f"has {MOE}.load_weights with 0 parameters, and 1 are passed"),
        (("(self, weights)", "(self, weights, *, dtype)"), f"has {MOE}.load_weights with the parameter dtype, which is not passed"),
        (("models.deepseek_v4:", "models.dsv4:"), f"has no {INNER}"),
        (("positions=None", "places=None"), f"has {INNER}.forward without the parameter positions"),
        (("(self, config, prefix=", "(self, config, device, prefix="), f"has {INNER}.__init__ with the parameter device, which is not passed"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("version", ["earlier", "later"])
def test_a_planted_change_is_caught_by_name(atom_of, version, changed, found):
    assert atom_of(version, *changed) == found


# ------------------------------------------------------------------------------------------------------------- doctor


def doctors_platform(monkeypatch, left_to):
    points = [SimpleNamespace(name="atom", value="atom.plugin.vllm.register:x")]
    monkeypatch.setattr(
        rocm_atom.metadata, "entry_points", lambda group: points if left_to else []
    )
    report = Report()
    found = {"chosen": "atom.plugin.vllm.platform.ATOMPlatform", "stock": "x"}
    found |= {"enum": "ROCM", "ours": None, "left_to": left_to, "refusal": None}
    engine.platform(report, Answer(found), Settings(model="atom"), {MODEL: "atom"})
    return report


def test_doctor_says_that_deepseek_v4_is_atoms_too(monkeypatch):
    report = doctors_platform(monkeypatch, "atom")
    assert report.faults == []
    assert report.sections["platform"]["why"] == (
        "the plugin leaves it to atom of ROCm/ATOM, and DeepSeek-V4 too, since model = atom"
    )


def test_doctor_finds_a_fault_in_the_setting_without_atom(monkeypatch):
    report = doctors_platform(monkeypatch, None)
    fault = report.faults[0]
    assert fault.startswith("model = atom, but ROCm/ATOM is not installed.")
