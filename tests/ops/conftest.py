"""Tests of Triton's kernels are collected where they run."""

from against_torch import refuse_a_provider_that_is_not_here
from interpreted import elsewhere


def pytest_configure(config):
    refuse_a_provider_that_is_not_here()


def pytest_collection_modifyitems(config, items):
    left = [item for item in items if elsewhere(item)]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]
