"""Whether this system lets a user make a network that no other process is in; and another user, for tests by root."""

import os
import subprocess
from pathlib import Path

import pytest

own_network = pytest.mark.skipif(
    not Path("/proc/self/ns/net").exists()
    or subprocess.run(["unshare", "--user", "--map-root-user", "--net", "true"], capture_output=True).returncode != 0,
    reason="this system lets no user make a network namespace",
)

# A user who may read all that root reads, and write nothing of it; without a network of its own, which would end that.
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
NOBODY += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
NOBODY += ["env", "COURSE_LIB_RANKS_NETWORK=host", "LANG=C.UTF-8"]
as_another_user = pytest.mark.skipif(
    os.getuid() != 0 or subprocess.run([*NOBODY, "true"], capture_output=True).returncode != 0,
    reason="only root can be another user",
)
