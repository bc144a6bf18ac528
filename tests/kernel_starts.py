"""A pytest plugin for nbval, and a helper of our own kernels: a kernel that dies while it starts is started again.

jupyter_client looks for five free ports, closes them, and has the kernel open them a second later. Where launches open
hundreds of sockets in that second, one of the five may be taken, and the kernel dies before it has answered. A kernel
that dies three times in a row is an error. And each kernel keeps a learner's sheet in a folder of its own.
"""

import os
import tempfile
import warnings

TRIES = 3


def started(start):
    """Return what start() returns; where it raises RuntimeError ("Kernel died before ..."), call it again.

    Errors: what the last try raised; any other error at once.
    """
    for trial in range(1, TRIES + 1):
        try:
            return start()
        except RuntimeError as error:
            if trial == TRIES:
                raise
            warnings.warn(f"try {trial} of {TRIES} to start a kernel: {error}", stacklevel=2)


def pytest_configure(config):
    """Let nbval start its kernels through `started`, and from a warm process where there is pidfd."""
    if not config.pluginmanager.hasplugin("nbval"):
        return
    from jupyter_client.provisioning import local_provisioner  # only where nbval runs
    from nbval import kernel

    from tests import warm_kernels

    if warm_kernels.is_possible():
        warm = warm_kernels.Warm()
        local_provisioner.launch_kernel = warm.launch_kernel
        config.add_cleanup(warm.close)

    once = kernel.start_new_kernel

    def alone(*args, **kwargs):
        os.environ["COURSE_SHEETS"] = tempfile.mkdtemp(prefix="sheets-")
        return started(lambda: once(*args, **kwargs))

    kernel.start_new_kernel = alone
