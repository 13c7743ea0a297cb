"""For every unit test."""

from forked import pytest_addoption, pytest_runtestloop
from hypothesis import settings

# Hooks of this folder: pytest takes no plugins from a conftest that is not the topmost one.
__all__ = ["pytest_addoption", "pytest_runtestloop"]

# How long an example takes says something about the machine only; speed has its own tests in tests/bench.
settings.register_profile("opd", deadline=None)
settings.load_profile("opd")
