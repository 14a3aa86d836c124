"""Settings of the tests in one process."""

from hypothesis import settings

# No test is timed. Everything else, such as what hypothesis chooses where CI is set, stays.
settings.register_profile("untimed", parent=settings.default, deadline=None)
settings.load_profile("untimed")
