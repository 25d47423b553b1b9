"""The site in docs/: the page of ops, tables, and a way to every page. `make lint` builds it, and fails on a link that leads nowhere."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


def test_the_page_of_ops_is_the_generated_one():
    from atom_vllm_bridge.models.ops import registry
    from atom_vllm_bridge.ops_page import ops_page

    page = (DOCS / "ops.md").read_text(encoding="utf-8")
    assert page == ops_page()
    assert all(f"| `{op}` |" in page for op in registry.names())


def test_every_row_of_a_table_has_as_many_cells_as_its_head():
    """A bar within a cell, even of code, would end it."""
    for document in [ROOT / "README.md", *DOCS.glob("*.md")]:
        width = 0
        for line in document.read_text(encoding="utf-8").splitlines():
            cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
            assert cells in (0, width) or not width, f"{document.name}: {line}"
            width = cells


def test_every_page_is_in_the_navigation():
    def pages(entry):
        if isinstance(entry, str):
            return [entry]
        entries = entry.values() if isinstance(entry, dict) else entry
        return [page for one in entries for page in pages(one)]

    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(pages(nav)) == sorted(path.name for path in DOCS.glob("*.md"))
