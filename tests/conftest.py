"""Marks of features, and the record of what became of the tests that have them."""

import features
import pytest


def pytest_addoption(parser):
    parser.addoption(
        "--record-features",
        action="store_true",
        help="write outcomes of tests marked `covers` or `refuses` into tests/feature_runs.json",
    )


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    # Properties of a report, since those of workers arrive with it.
    outcome = yield
    covers, refuses = features.covered(item), features.refused(item)
    if covers or refuses:
        properties = outcome.get_result().user_properties
        properties.append(("features", {"covers": covers, "refuses": refuses}))


class Record:
    """What becomes of each marked test; a setup or teardown that fails counts."""

    def __init__(self):
        self.runs: features.Runs = {}

    def pytest_runtest_logreport(self, report):
        said = dict(report.user_properties)
        if "features" not in said:
            return
        known = self.runs.get(report.nodeid)
        if known is not None and known["outcome"] != features.PASSED:
            return
        reason = report.longrepr[2] if report.skipped else ""
        self.runs[report.nodeid] = said["features"] | {
            "outcome": report.outcome,
            "reason": reason.removeprefix("Skipped: "),
            "line": said.get("refusal", ""),
        }

    def pytest_sessionfinish(self, session):
        import torch
        from vllm import __version__

        gpu = torch.cuda.is_available()
        where = {
            "on": torch.cuda.get_device_name() if gpu else "CPU",
            "vllm": __version__,
        }
        new = {id: run | where for id, run in self.runs.items()}
        features.write(features.merged(features.read(), new))


def pytest_configure(config):
    for name in ("covers", "refuses"):
        config.addinivalue_line("markers", f"{name}(**features): see tests/features.py")
    # Of xdist's processes, the one that hears of all tests.
    if config.getoption("--record-features") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Record())
