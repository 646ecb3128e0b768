"""Parts that the tests of the study share."""

import pytest
from support import one_thread  # noqa: F401  the fixture is automatic

pytest.register_assert_rewrite("study_tools")  # so that differences are shown
