"""The site in docs/: the page of ops, and a way to every page. `make lint` builds it, and fails on a link that leads nowhere."""

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


def test_every_page_is_in_the_navigation():
    def pages(entry):
        if isinstance(entry, str):
            return [entry]
        entries = entry.values() if isinstance(entry, dict) else entry
        return [page for one in entries for page in pages(one)]

    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(pages(nav)) == sorted(path.name for path in DOCS.glob("*.md"))
