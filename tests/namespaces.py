"""Whether this system lets a user make a network that no other process is in."""

import subprocess
from pathlib import Path

import pytest

own_network = pytest.mark.skipif(
    not Path("/proc/self/ns/net").exists()
    or subprocess.run(["unshare", "--user", "--map-root-user", "--net", "true"], capture_output=True).returncode != 0,
    reason="this system lets no user make a network namespace",
)
