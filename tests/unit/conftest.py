"""For every unit test."""

from hypothesis import settings

# How long an example takes says something about the machine only; speed has its own tests in tests/bench.
settings.register_profile("opd", deadline=None)
settings.load_profile("opd")
