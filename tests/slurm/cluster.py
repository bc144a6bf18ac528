#!/usr/bin/env python3
"""A real Slurm of two virtual nodes on this machine, for as long as one command runs.

    tests/slurm/cluster.py -- COMMAND ...       for example: tests/slurm/cluster.py -- sinfo

Slurm and munge are Debian's (`apt-get install slurm-wlm munge`); where they are missing they are installed. All that
the cluster writes lies in one temporary folder, all ports are free ones on the loopback, and every daemon is ended by
its own process id: several clusters can run at once, beside a Slurm of the machine's own. Only Python's standard
library is used, and root is needed: munged runs as user munge, and slurmd starts processes for users.
"""

import contextlib
import ctypes
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

NODES = ("n1", "n2")  # as in slurm.conf.in
PROGRAMS = ("munged", "slurmctld", "slurmd", "sinfo", "scontrol", "sbatch", "srun", "scancel", "squeue")
CLONE_NEWUTS = 0x04000000  # a name of the machine of one's own: linux/sched.h
START_LIMIT_S = 30.0
END_LIMIT_S = 30.0  # a busy machine needs long to end processes


class ClusterError(RuntimeError):
    """The cluster cannot be set up; the text says what to do."""


def main(arguments: list[str]) -> int:
    command = arguments[1:] if arguments[:1] == ["--"] else arguments
    if not command:
        print("usage: tests/slurm/cluster.py -- COMMAND ...", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the daemons are ended as well
    try:
        install()
        with cluster() as environment:
            return subprocess.run(command, env=environment).returncode
    except ClusterError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1


def install() -> None:
    """Have Debian's Slurm and munge on this machine. Does nothing where they are."""
    if os.geteuid() != 0:
        raise ClusterError("needs root (munged runs as user munge, slurmd starts processes for users); try sudo")
    if not missing_programs():
        return
    if shutil.which("apt-get") is None:
        raise ClusterError(f"no {', '.join(missing_programs())} here, and no apt-get; install Slurm and munge first")
    start = time.monotonic()
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}  # RUNLEVEL: start no service
    subprocess.run(["apt-get", "update", "-qq"], env=quiet, stdout=subprocess.DEVNULL)
    done = subprocess.run(
        ["apt-get", "install", "-qq", "-y", "--no-install-recommends", "slurm-wlm", "munge"],
        env=quiet,
        capture_output=True,
        text=True,
    )
    if done.returncode or missing_programs():
        raise ClusterError(f"apt-get could not install slurm-wlm and munge:\n{(done.stdout + done.stderr)[-2000:]}")
    print(f"cluster: installed slurm-wlm and munge in {time.monotonic() - start:.1f} s", file=sys.stderr)


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if find(name) is None]


def find(name: str) -> str | None:
    """A program's path; daemons are in /usr/sbin, which is not on everybody's PATH."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@contextlib.contextmanager
def cluster() -> Iterator[dict[str, str]]:
    """Start munged, slurmctld and two slurmd; the environment in which Slurm's commands find them. Ends them all."""
    start = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="course_slurm_"))
    folder.chmod(0o755)  # munged, as user munge, must reach its own folder
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "GLOO_SOCKET_IFNAME": "lo"}
    daemons: dict[str, subprocess.Popen] = {}
    try:
        write_configuration(folder)
        start_munged(folder, daemons)
        for name, arguments in {"slurmctld": [], **{node: ["-N", node] for node in NODES}}.items():
            program = find("slurmctld" if name == "slurmctld" else "slurmd")
            daemons[name] = start_daemon([program, "-D", *arguments], folder / f"{name}.log", environment)
        wait_until_idle(folder, daemons, environment)
        print(f"cluster: nodes {' and '.join(NODES)} idle after {time.monotonic() - start:.1f} s", file=sys.stderr)
        yield environment
    finally:
        end(daemons, environment)
        shutil.rmtree(folder, ignore_errors=True)


def write_configuration(folder: Path) -> None:
    (folder / "state").mkdir()
    ctld_port, n1_port, n2_port = free_ports(3)
    text = (Path(__file__).parent / "slurm.conf.in").read_text()
    address = loopback_address()  # may rename the machine
    values = {"HOST": socket.gethostname(), "ADDRESS": address, "DIR": folder}
    for name, value in {**values, "CTLD_PORT": ctld_port, "N1_PORT": n1_port, "N2_PORT": n2_port}.items():
        text = text.replace(f"@{name}@", str(value))
    (folder / "slurm.conf").write_text(text)


def loopback_address() -> str:
    """The address of this machine's name, to which Slurm binds. Where it is not a loopback one, take another name."""
    name = socket.gethostname()
    if not address_of(name).startswith("127."):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWUTS) != 0:
            raise ClusterError(
                f"Slurm would listen beyond the loopback: {name} is {address_of(name)}, and a private name is not "
                f"allowed here ({os.strerror(ctypes.get_errno())}); add the line '127.0.0.1 {name}' to /etc/hosts"
            )
        socket.sethostname("localhost")  # for this process and its children alone
    return address_of(socket.gethostname())


def address_of(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return "not known"


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses now."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def start_munged(folder: Path, daemons: dict) -> None:
    """Munge vouches for who sent a message; it has a key, a socket and a log of its own here."""
    home = folder / "munge"
    home.mkdir(mode=0o755)
    (home / "key").write_bytes(secrets.token_bytes(128))
    (home / "key").chmod(0o400)
    user = pwd.getpwnam("munge")
    for path in (home, home / "key"):
        os.chown(path, user.pw_uid, user.pw_gid)
    files = [f"--{name}-file={home / name}" for name in ("key", "pid", "seed", "log")]
    daemons["munged"] = subprocess.Popen(
        [find("munged"), "--foreground", f"--socket={home / 'socket'}", *files],
        user=user.pw_uid,
        group=user.pw_gid,
        extra_groups=[],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=(folder / "munged.log").open("w"),
        start_new_session=True,
    )
    give_up = time.monotonic() + START_LIMIT_S
    while not (home / "socket").exists():
        if daemons["munged"].poll() is not None or time.monotonic() > give_up:
            raise ClusterError(f"munged did not start:\n{last_words(folder)}")
        time.sleep(0.02)


def start_daemon(command: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=log.with_suffix(".stderr").open("w"),
        start_new_session=True,  # Ctrl-C in the terminal must not end it before the jobs are ended
    )


def wait_until_idle(folder: Path, daemons: dict, environment: dict[str, str]) -> None:
    give_up = time.monotonic() + START_LIMIT_S
    time.sleep(0.3)  # a client that comes too early waits for seconds
    while True:
        gone = [name for name, process in daemons.items() if process.poll() is not None]
        if gone or time.monotonic() > give_up:
            what = f"{', '.join(gone)} ended" if gone else f"nodes were not idle after {START_LIMIT_S:g} s"
            raise ClusterError(f"{what}\n{last_words(folder)}")
        if run_quietly(["sinfo", "-h", "-N", "-o", "%N %T"], environment).stdout == "n1 idle\nn2 idle\n":
            return
        time.sleep(0.1)


def last_words(folder: Path) -> str:
    """The last lines of every daemon's log."""
    logs = sorted(folder.glob("*.log")) + sorted(folder.glob("*.stderr")) + sorted(folder.glob("munge/log"))
    tails = {log.name: log.read_text(errors="replace").splitlines()[-8:] for log in logs}
    return "\n".join(f"{name}: {line}" for name, lines in tails.items() for line in lines)


def end(daemons: dict, environment: dict[str, str]) -> None:
    """End jobs and daemons: Slurm by its own command, what is left by its process id, munged last."""
    complete = len(daemons) == 2 + len(NODES) and all(process.poll() is None for process in daemons.values())
    if complete:
        run_quietly(["scancel", "--user=root"], environment)
        give_up = time.monotonic() + END_LIMIT_S
        while run_quietly(["squeue", "-h"], environment).stdout.strip() and time.monotonic() < give_up:
            time.sleep(0.1)
        run_quietly(["scontrol", "shutdown"], environment)
    for name in sorted(daemons, key=lambda name: name == "munged"):
        process = daemons[name]
        if name == "munged" or not complete:
            process.terminate()
        try:
            process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def run_quietly(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess:
    command = [find(command[0]), *command[1:]]
    try:
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=END_LIMIT_S)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", "")  # its controller is gone; the caller looks again


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
