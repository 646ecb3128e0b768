"""Parts that the tests of the study share."""

from support import one_thread  # noqa: F401  the fixture is automatic
