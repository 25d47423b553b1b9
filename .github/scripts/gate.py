"""Which heavy suites a pull request's event starts, and why not.

Reads the event as GitHub stores it (`GITHUB_EVENT_NAME`, `GITHUB_EVENT_PATH`) and prints lines for `GITHUB_OUTPUT`:
`vllm`, `atom` and `gpu` are `true` or `false`, and `vllm_why`, `atom_why` and `gpu_why` say why. Nothing that a
contributor can write (titles, branches, other labels) is printed, so that no line can be forged.

The gate saves machine time; it is not a wall. A pull request brings its own copy of this file and of the workflow, so
what protects the project is what the two events below grant a fork: a token that only reads, and no secrets. A runner of
one's own belongs in a runner group that runs no fork's workflows.
"""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

# The labels that start each suite.
SUITES = {
    "vllm": ("ci:vllm", "ci:full"),
    "atom": ("ci:atom", "ci:full"),
}
APPROVAL_STARTS = {"vllm"}
# Known from projects with more engines; setting it is no mistake, but starts nothing.
WITHOUT_A_SUITE = "ci:sglang"

# Anybody may approve on a public repository; these associations come with an invitation.
TRUSTED_REVIEWERS = {"OWNER", "MEMBER", "COLLABORATOR"}

# The actions after which labels that were set before still have to start their suites.
NEW_STATE = {"synchronize", "reopened", "ready_for_review"}


class Verdict(NamedTuple):
    runs: bool
    why: str


def from_a_fork(pull: dict[str, Any]) -> bool:
    head = pull["head"]["repo"]  # None once the fork is deleted.
    return head is None or head["full_name"] != pull["base"]["repo"]["full_name"]


def by_label(suite: str, payload: dict[str, Any]) -> Verdict:
    if payload["action"] == "labeled":
        added = payload["label"]["name"]
        if added in SUITES[suite]:
            return Verdict(True, f"label {added}")
        if added == WITHOUT_A_SUITE:
            return Verdict(False, f"{WITHOUT_A_SUITE} does not apply to this project")
        return Verdict(False, "the label that was added does not start it")
    if payload["action"] not in NEW_STATE:
        return Verdict(False, "this action starts nothing")
    labels = {label["name"] for label in payload["pull_request"]["labels"]}
    for label in SUITES[suite]:
        if label in labels:
            return Verdict(True, f"label {label}")
    return Verdict(False, f"neither {' nor '.join(SUITES[suite])} is set")


def by_review(suite: str, payload: dict[str, Any]) -> Verdict:
    pull, review = payload["pull_request"], payload["review"]
    if payload["action"] != "submitted" or review["state"] != "approved":
        return Verdict(False, "the review does not approve")
    if suite not in APPROVAL_STARTS:
        return Verdict(False, "an approval does not start it")
    if review["author_association"] not in TRUSTED_REVIEWERS:
        return Verdict(False, "the reviewer is not a member of the project")
    if review["commit_id"] != pull["head"]["sha"]:
        return Verdict(False, "the approval is of an older commit")
    if any(label["name"] in SUITES[suite] for label in pull["labels"]):
        return Verdict(False, "its label has started it for this commit")
    return Verdict(True, "approving review")


def decide(event: str, payload: dict[str, Any]) -> dict[str, Verdict]:
    """The verdict for each suite, and for the runners with GPUs (`gpu`)."""
    rule = {"pull_request": by_label, "pull_request_review": by_review}.get(event)
    if rule is None:
        # Above all pull_request_target, whose token writes and which sees secrets even for a fork.
        no = Verdict(False, "only pull_request and pull_request_review start it")
        return dict.fromkeys([*SUITES, "gpu"], no)
    pull = payload["pull_request"]
    if pull["state"] != "open":
        verdicts = dict.fromkeys(SUITES, Verdict(False, "the pull request is closed"))
    elif pull["draft"]:
        why = "a draft: it starts when the pull request is ready for review"
        verdicts = dict.fromkeys(SUITES, Verdict(False, why))
    else:
        verdicts = {suite: rule(suite, payload) for suite in SUITES}
    if not verdicts["vllm"].runs:
        gpu = Verdict(False, "the suite vllm does not run")
    elif from_a_fork(pull):
        gpu = Verdict(False, "a fork's code runs on GitHub's machines only")
    else:
        gpu = Verdict(True, "the branch is this repository's own")
    return {**verdicts, "gpu": gpu}


def main() -> None:
    payload = json.loads(Path(os.environ["GITHUB_EVENT_PATH"]).read_text("utf-8"))
    verdicts = decide(os.environ["GITHUB_EVENT_NAME"], payload)
    for name, verdict in verdicts.items():
        print(f"{name}={str(verdict.runs).lower()}")
        print(f"{name}_why={verdict.why}")


if __name__ == "__main__":
    main()
