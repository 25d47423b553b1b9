"""The guarded changes to vLLM, as data: what, why, where, until when.

A patch replaces one function of vLLM. It names its target, the signature and the
digest of the source that it was written against, and a probe that tells when vLLM
needs it no longer; on any other vLLM it is refused, and vLLM stays as it was. A duty
is what needs no patch: an official hook of vLLM does it.

Standard library only, until a patch is applied.
"""

import hashlib
import importlib
import inspect
import logging
import pkgutil
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

DECLARED = "declared"
APPLIED = "applied"
ALREADY_UPSTREAM = "already_upstream"
NOT_APPLICABLE = "not_applicable"
REFUSED = "refused"
TURNED_OFF = "turned_off"

VARIABLE = "ATOM_BRIDGE_DISABLE_PATCH"
"""Read by settings.py; named in what is said of a patch that it turns off."""

ANY = "any"


@dataclass(frozen=True)
class Fingerprint:
    """What a patch was written against.

    Attributes:
        signature: the target's signature without annotations, "(self, grid)".
        source: the first 16 hexadecimal digits of the SHA-256 of its source,
            dedented, as `inspect.getsource` gives it.
    """

    signature: str
    source: str


@dataclass(frozen=True)
class Patch:
    """One change to vLLM.

    Attributes:
        id: a name with dashes, unique.
        target: "module:Qual.name" of the function that is replaced.
        runner: "v1", "v2" or "any".
        process: "engine", "worker" or "any"; where the change is needed.
        why: what goes wrong without it.
        upstream: the issue or pull request, or "no issue known".
        without: what the user meets where the patch is not applied.
        test: the pytest node that fails once the installed vLLM needs it no longer.
        remove_when: whether that is so. Called only when the patch is about to be
            applied; may import vLLM.
        expects: what the target must look like.
        apply: takes the target, returns its replacement.
        needed_on: the device type ("cpu") on which DeepSeek-V4 does not run without it.
    """

    id: str
    target: str
    runner: str
    process: str
    why: str
    upstream: str
    without: str
    test: str
    remove_when: Callable[[], bool]
    expects: Fingerprint
    apply: Callable[[Any], Any]
    needed_on: str = ""


@dataclass(frozen=True)
class Duty:
    """What others patch vLLM for, and the bridge does through an official hook.

    Attributes:
        id: a name with dashes, unique among patches and duties.
        instead_of: what is replaced elsewhere; not always there in this vLLM.
        what: the duty.
        hook: "module:Qual.name" of vLLM that makes the patch unnecessary.
        used: "module:Qual.name" of the bridge that answers to it.
        test: the pytest node that shows it.
    """

    id: str
    instead_of: str
    what: str
    hook: str
    used: str
    test: str


@dataclass(frozen=True)
class State:
    """`name` is one of the constants above; `reason` is empty unless refused or turned off."""

    name: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name}({self.reason})" if self.reason else self.name


@dataclass(frozen=True)
class _Replaced:
    owner: Any
    attribute: str
    original: Any


class Registry:
    """Patches and duties by id, their states in this process, and the way back."""

    def __init__(self) -> None:
        self._patches: dict[str, Patch] = {}
        self._duties: dict[str, Duty] = {}
        self._off: frozenset[str] = frozenset()
        self._states: dict[str, State] = {}
        self._replaced: dict[str, _Replaced] = {}
        # Two engines may be built from two threads of one process.
        self._lock = threading.RLock()

    def add(self, entry: Patch | Duty) -> None:
        """Declare a patch or a duty.

        Raises:
            ValueError: the id is taken.
        """
        if entry.id in self._states:
            raise ValueError(
                f"patch {entry.id}: declared twice. Give one of them another id."
            )
        if isinstance(entry, Duty):
            self._duties[entry.id] = entry
        else:
            self._patches[entry.id] = entry
        self._states[entry.id] = State(DECLARED)

    def turn_off(self, ids: Iterable[str]) -> None:
        """From now on, apply none of `ids`, and only these; what is applied already stays."""
        with self._lock:
            self._off = frozenset(ids)

    def __iter__(self) -> Iterator[Patch]:
        """The patches."""
        # By id: whoever imports a patch first would else decide the order.
        return iter(sorted(self._patches.values(), key=lambda patch: patch.id))

    def duties(self) -> list[Duty]:
        """The duties, in the order in which they were declared."""
        return list(self._duties.values())

    def __getitem__(self, id: str) -> Patch:
        return self._patches[id]

    def state(self, id: str) -> State:
        """The state of a patch or duty in this process, `declared` before `apply`."""
        return self._states[id]

    def apply(self, id: str, *, runner: str = ANY, process: str = ANY) -> State:
        """Apply a patch unless vLLM, the user, runner or process say otherwise.

        A patch that is applied already stays so, whatever runner and process are. Of a
        duty, only its hook is looked up.

        Args:
            id: which patch or duty.
            runner: the runner of this engine, "v1" or "v2"; "any" asks for every one.
            process: what this process is, "engine" or "worker"; likewise.
        """
        with self._lock:
            if id in self._duties:
                self._states[id] = _state_of(self._duties[id])
            elif self._states[id].name != APPLIED:
                self._states[id] = self._apply(self._patches[id], runner, process)
                logger.debug("patch %s: %s", id, self._states[id])
            return self._states[id]

    def apply_all(self, *, runner: str = ANY, process: str = ANY) -> dict[str, State]:
        """Apply every patch and look up every hook; a state for each id."""
        return {
            id: self.apply(id, runner=runner, process=process) for id in self._states
        }

    def restore(self, id: str) -> None:
        """Undo a patch. One that is not applied only becomes `declared` again.

        Raises:
            RuntimeError: something else has replaced the target since.
        """
        with self._lock:
            replaced = self._replaced.get(id)
            if replaced is not None:
                now = vars(replaced.owner).get(replaced.attribute)
                if getattr(_function(now), "_atom_bridge_patch", None) != id:
                    raise RuntimeError(
                        f"patch {id}: {self._patches[id].target} was replaced again by "
                        "something else, so it cannot be restored. Undo that first."
                    )
                setattr(replaced.owner, replaced.attribute, replaced.original)
                del self._replaced[id]
            self._states[id] = State(DECLARED)

    def table(self) -> list[dict[str, str]]:
        """One row a patch, for the documentation and for doctor. Imports nothing."""
        return [
            {
                "id": patch.id,
                "target": patch.target,
                "runner": patch.runner,
                "process": patch.process,
                **self._state_row(patch.id),
                "why": patch.why,
                "without": patch.without,
                "needed_on": patch.needed_on,
                "upstream": patch.upstream,
                "test": patch.test,
            }
            for patch in self
        ]

    def duty_table(self) -> list[dict[str, str]]:
        """One row a duty, likewise."""
        return [
            {
                "id": duty.id,
                "instead_of": duty.instead_of,
                **self._state_row(duty.id),
                "what": duty.what,
                "hook": duty.hook,
                "used": duty.used,
                "test": duty.test,
            }
            for duty in self.duties()
        ]

    def _state_row(self, id: str) -> dict[str, str]:
        state = self._states[id]
        return {"state": state.name, "reason": state.reason}

    def _apply(self, patch: Patch, runner: str, process: str) -> State:
        wanted = ((patch.runner, runner), (patch.process, process))
        if any(ANY not in pair and pair[0] != pair[1] for pair in wanted):
            return State(NOT_APPLICABLE)
        if patch.id in self._off:
            return State(TURNED_OFF, f"by {VARIABLE}")
        try:
            if patch.remove_when():
                return State(ALREADY_UPSTREAM)
            owner, attribute, original = _resolve(patch.target)
            found = fingerprint(_function(original))
        except (ImportError, AttributeError, OSError, TypeError) as error:
            return State(REFUSED, f"{patch.target} cannot be read: {error}")
        if found != patch.expects:
            which = (
                "signature" if found.signature != patch.expects.signature else "body"
            )
            return State(
                REFUSED,
                f"the {which} of {patch.target} has changed: expected {patch.expects}, "
                f"found {found}",
            )
        replacement = patch.apply(_function(original))
        replacement._atom_bridge_patch = patch.id
        setattr(owner, attribute, _wrapped_like(original, replacement))
        self._replaced[patch.id] = _Replaced(owner, attribute, original)
        return State(APPLIED)


def fingerprint(function: Callable[..., Any]) -> Fingerprint:
    """The fingerprint of a function of the installed vLLM.

    Raises:
        OSError, TypeError: it has no Python source.
    """
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(function).parameters.values()
    ]
    source = textwrap.dedent(inspect.getsource(function))
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    return Fingerprint(str(inspect.Signature(bare)), digest)


def find(path: str) -> Any:
    """The object that "module:Qual.name" stands for.

    Raises:
        ImportError, AttributeError: there is none.
    """
    module_name, _, names = path.partition(":")
    found: Any = importlib.import_module(module_name)
    for name in names.split("."):
        found = getattr(found, name)
    return found


def _state_of(duty: Duty) -> State:
    try:
        find(duty.hook)
    except (ImportError, AttributeError) as error:
        return State(REFUSED, f"this vLLM lacks the hook {duty.hook}: {error}")
    return State(ALREADY_UPSTREAM)


def _resolve(target: str) -> tuple[Any, str, Any]:
    """Owner, attribute name and raw attribute (a descriptor stays one)."""
    module_name, _, path = target.partition(":")
    owner: Any = importlib.import_module(module_name)
    *holders, attribute = path.split(".")
    for name in holders:
        owner = getattr(owner, name)
    if attribute not in vars(owner):
        raise AttributeError(f"{owner.__name__} does not define {attribute}")
    return owner, attribute, vars(owner)[attribute]


def _function(attribute: Any) -> Any:
    if isinstance(attribute, (staticmethod, classmethod)):
        return attribute.__func__
    return attribute


def _wrapped_like(original: Any, replacement: Any) -> Any:
    if isinstance(original, (staticmethod, classmethod)):
        return type(original)(replacement)
    return replacement


PATCHES = Registry()


def load() -> Registry:
    """The registry with every file of this package declared in it.

    A process started by spawn gets the same table by calling this.
    """
    package = importlib.import_module("atom_vllm_bridge.patches")
    for module in sorted(m.name for m in pkgutil.iter_modules(package.__path__)):
        importlib.import_module(f"{package.__name__}.{module}")
    return PATCHES
