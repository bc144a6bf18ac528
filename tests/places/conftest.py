"""The wheel of the course, which these tests install elsewhere."""

from pathlib import Path

import pytest
from places.environments import build_wheel


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    """The course as it is in this clone, built."""
    return build_wheel(tmp_path_factory.mktemp("build"))
