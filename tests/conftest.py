"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings

# How long an example takes says something of the machine, and what else it does.
settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")
