"""The page `docs/patches.md`, from the registry: `python -m atom_vllm_bridge.patches.page` prints it."""

from atom_vllm_bridge.patches import registry


def patches_page() -> str:
    """The text of `docs/patches.md`: what is patched, and what needs no patch."""
    patches = registry.load()
    sections = "\n\n".join(_section(row) for row in patches.table())
    duties = "\n".join(_duty(row) for row in patches.duty_table())
    return _PAGE.format(sections=sections, duties=duties, variable=registry.VARIABLE)


def _section(row: dict[str, str]) -> str:
    needed = f"; needed on: {row['needed_on']}" if row["needed_on"] else ""
    return _PATCH.format(**(row | {"needed": needed}))


def _duty(row: dict[str, str]) -> str:
    cells = (
        row["id"],
        row["what"],
        _cell(row["hook"]),
        _cell(row["used"]),
        _cell(row["test"]),
        row["instead_of"],
    )
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    return f"`{text}`"


_PATCH = """\
### {id}

{why}

- replaces `{target}` (runner {runner}, process {process}{needed})
- without it: {without}
- upstream: {upstream}
- goes when `{test}` fails"""


_PAGE = """\
# Patches

What vLLM does not do by itself, and by which means the bridge gets it done. `atom-vllm-bridge doctor` shows the state of
each entry in the vLLM that is installed, the table at the start those of the patches in use, and the series
`atom_bridge:patch_state` ([metrics](metrics.md)) those of a running server.

| state | meaning |
|---|---|
| `declared` | known; nothing has asked for it in this process |
| `applied` | vLLM's function is replaced |
| `already_upstream` | this vLLM does it by itself |
| `not_applicable` | for another runner or process |
| `turned_off` | named in `{variable}` |
| `refused` | vLLM's function has another signature or body than the patch was written for; it stays as it is |

## Applied where they are needed

`{variable}=id,id` leaves patches out. One that DeepSeek-V4 needs on the device in use stops the start with one line.

{sections}

## Done by vLLM's own hooks

What other plugins patch vLLM for. The last column names what they replace; the bridge leaves it alone.

| duty | what | vLLM's hook | in the bridge | shown by | instead of replacing |
|---|---|---|---|---|---|
{duties}

This page is made from the code: `make docs` writes it.
"""


if __name__ == "__main__":
    print(patches_page(), end="")
