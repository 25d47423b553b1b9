"""Checkpoints by the names that they have on a hub: those that lie whole in its cache on this machine. Nothing is fetched."""

import json
import re
from pathlib import Path

from atom_vllm_bridge.models.deepseek_v4.shards import INDEX, SINGLE


def is_name(model: str) -> bool:
    """Whether `model` is a name as a hub has them, organisation/model, and no directory here."""
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", model)) and not Path(model).is_dir()


def directory_of(
    model: str, revision: str | None = None, cache: str | None = None
) -> Path | None:
    """Where a checkpoint's files are.

    Args:
        model: a directory, or a name as a hub has them.
        revision: a branch, tag or commit; None: the main branch.
        cache: the hub's cache; None: where its library keeps it.

    Returns:
        None where there is no such directory, nor all of that revision in the cache.
    """
    if Path(model).is_dir():
        return Path(model)
    if not is_name(model):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        # As doctor meets it without vLLM, which brings it.
        return None
    found = try_to_load_from_cache(
        model, "config.json", cache_dir=cache, revision=revision
    )
    if not isinstance(found, str):
        return None
    directory = Path(found).parent
    try:
        shards = set(
            json.loads((directory / INDEX).read_bytes())["weight_map"].values()
        )
    except FileNotFoundError:
        shards = {SINGLE}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        # An index that is none, of which reading the checkpoint says more.
        return directory
    there = all((directory / str(shard)).is_file() for shard in shards)
    return directory if there else None
