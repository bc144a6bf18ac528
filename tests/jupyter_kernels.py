"""A notebook kernel of its own for a test, and what its launches leave behind."""

import re
import time
from functools import partial
from types import SimpleNamespace

import psutil
from jupyter_client.manager import start_new_kernel
from kernel_starts import started

ANSI = re.compile(r"\x1b\[[0-9;]*m")


class Kernel:
    """A notebook kernel, and what a reader would see below a cell."""

    def __init__(self):
        self.manager, self.client = started(partial(start_new_kernel, startup_timeout=60))
        self.process = psutil.Process(self.manager.provisioner.pid)

    def start(self, code):
        return self.client.execute(code.strip())

    def finish(self, message_id, timeout=60):
        out, err, error, messages = [], [], "", []
        while True:
            message = self.client.get_iopub_msg(timeout=timeout)
            if message["parent_header"].get("msg_id") != message_id:
                continue
            kind, content = message["msg_type"], message["content"]
            messages.append(message)
            if kind == "stream":
                (out if content["name"] == "stdout" else err).append(content["text"])
            elif kind == "error":
                error = ANSI.sub("", "\n".join(content["traceback"]))
            elif kind == "status" and content["execution_state"] == "idle":
                return SimpleNamespace(out="".join(out), err="".join(err), error=error, messages=messages)

    def run(self, code, timeout=60):
        start = time.monotonic()
        cell = self.finish(self.start(code), timeout)
        cell.seconds = time.monotonic() - start
        return cell

    def show(self, code):
        cell = self.run(code)
        assert not cell.error, cell.error
        return cell

    def fail(self, code):
        """Run a cell that must fail, and prove that the next launch works."""
        cell = self.run(code)
        assert cell.error, cell.out
        assert self.show("print(list(launch(lambda: dist.get_rank(), 2, quiet=True)))").out == "[0, 1]\n"
        return cell

    def helpers(self):
        """Every process below the kernel."""
        return self.process.children(recursive=True)

    def stop(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


def remaining(processes, within_s=3.0):
    """Those of `processes` that are still there after a moment."""
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    return [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def still_there(pid, within_s=2.0):
    """Whether a process lives, after a moment for its end; it may have a new parent, so its number is all there is."""
    try:
        return bool(remaining([psutil.Process(pid)], within_s))
    except psutil.NoSuchProcess:
        return False
