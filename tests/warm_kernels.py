"""Kernels for nbval that are forked from a process which has imported what every notebook imports: torch, matplotlib.

A kernel and the fork server of its launches each import torch, 3 to 6 s of one core, in each of the notebooks. Here one
process for each worker of pytest imports it; kernels are its forks, and each has a fork of its own ready that becomes
the fork server. The course's own modules are imported by each notebook itself, except the launcher. Other tests and
`course run` start kernels as Jupyter does, and so does nbval where a process cannot be watched by a pidfd (not Linux).
"""

import contextlib
import os
import pickle
import random
import select
import signal
import socket
import subprocess
import sys
import threading

# --- in the process of pytest


def is_possible():
    """Whether a process can be watched by a pidfd here: on Linux from 5.3 on."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


class Warm:
    """The warm process, started at the first kernel; `launch_kernel` stands in for jupyter_client's function."""

    def __init__(self):
        self._process = None

    def launch_kernel(self, cmd, env=None, cwd=None, **options):
        """Fork a kernel that reads the connection file of `cmd`; returns a handle with the methods of a Popen."""
        if self._process is None:
            self._socket, theirs = socket.socketpair()
            command = [sys.executable, __file__, str(theirs.fileno())]
            start = {"OPENBLAS_NUM_THREADS": "1", **os.environ}
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=start, start_new_session=True
            )
            theirs.close()
        request = pickle.dumps((cmd[cmd.index("-f") :], env or dict(os.environ), str(cwd or os.getcwd())))
        self._socket.sendall(len(request).to_bytes(8, "little") + request)
        answer = self._socket.recv(8)
        if not answer:
            raise RuntimeError("the process that kernels are forked from has ended")
        return Forked(int.from_bytes(answer, "little"))

    def close(self):
        """End the warm process, if there is one; kernels that are still there end with it."""
        if self._process is not None:
            self._socket.close()
            self._process.wait()


class Forked:
    """A process that may be no child of this one, as subprocess.Popen shows it. Its exit code is not known: 0."""

    stdin = stdout = stderr = None

    def __init__(self, pid):
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)

    def poll(self):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)
        return 0 if select.select([self._pidfd], [], [], 0)[0] else None

    def wait(self, timeout=None):
        if not select.select([self._pidfd], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a forked process", timeout)
        return self.poll()

    def send_signal(self, number):
        signal.pidfd_send_signal(self._pidfd, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def terminate(self):
        self.send_signal(signal.SIGTERM)


# --- in the warm process


def serve(control):
    """Fork a kernel for each request until pytest is gone."""
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")  # as ipykernel does
    from course_lib.launch import _fork_server

    _fork_server.preload(("ipykernel.kernelapp", "ipywidgets", "matplotlib.pyplot", *_fork_server.PRELOAD))
    assert threading.active_count() == 1, "a process with threads cannot be forked"
    while size := control.recv(8):
        request = pickle.loads(control.recv(int.from_bytes(size, "little"), socket.MSG_WAITALL))
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if os.fork() == 0:
            os.setsid()  # before its number is told: jupyter_client signals its whole process group
            control.sendall(os.getpid().to_bytes(8, "little"))
            control.close()
            be_kernel(*request)
            break


def be_kernel(arguments, environment, folder):
    """In the forked child: be what `python -m ipykernel_launcher` is in `folder`."""
    from ipykernel import kernelapp

    from course_lib.launch import _processes

    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # nbval wants no stderr of the process; a cell's goes through messages
    random.seed()
    sys.modules["numpy"].random.seed()
    parent = f"--IPKernelApp.parent_handle={os.getppid()}"  # it ends with the warm process
    sys.argv[:] = ["ipykernel_launcher.py", *arguments, parent]
    _processes.start_server = Spare(_processes.start_server).start
    kernelapp.launch_new_instance()


class Spare:
    """A fork of the kernel from before it had threads, which becomes the fork server of its launches; the next, if that
    one is lost, is started anew."""

    def __init__(self, start_new):
        self._start_new = start_new
        self._socket, theirs = socket.socketpair()
        kernel = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            self._socket.close()
            _be_server(theirs, kernel)
        theirs.close()

    def start(self, control_fd, errors):
        if self._socket.fileno() < 0:
            return self._start_new(control_fd, errors)
        settings = pickle.dumps((sys.path, dict(os.environ)))
        socket.send_fds(self._socket, [len(settings).to_bytes(8, "little")], [control_fd, errors.fileno()])
        self._socket.sendall(settings)
        self._socket.close()
        return Forked(self._pid)


def _be_server(request, kernel):
    """In the fork of the kernel: wait until it launches, then be its fork server; end with it."""
    from course_lib.launch import _fork_server

    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    size, descriptors, _, _ = socket.recv_fds(request, 8, 2)
    if not size:
        os._exit(0)
    path, environment = pickle.loads(request.recv(int.from_bytes(size, "little"), socket.MSG_WAITALL))
    request.close()
    sys.path[:] = path
    os.environ.clear()
    os.environ.update({"OPENBLAS_NUM_THREADS": "1"}, **environment)
    control_fd, errors = descriptors
    for stream in (1, 2):
        os.dup2(errors, stream)
    os.close(errors)
    _fork_server.serve(control_fd, kernel)


if __name__ == "__main__":
    del sys.path[0]  # this folder
    serve(socket.socket(fileno=int(sys.argv[1])))
