"""Environments of their own for doctor: empty ones, into which a test lays the packages that it wants, broken or not."""

import json
import os
import subprocess
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

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


def fault(report: dict, *parts: str) -> str:
    """The one fault that has all of `parts`."""
    (found,) = [f for f in report["faults"] if all(part in f for part in parts)]
    return found
