"""A network of their own for the ranks of one notebook or one torchrun, where Linux lets a user make one.

gloo's sockets ask nobody who he is, and loopback is shared by all users of a machine: whoever connects first takes the
place of a rank. In a network namespace of their own ranks see one another and nobody else, and nobody sees them. What
it costs is paid once, when the fork server starts. Elsewhere (macOS, Windows, a system that forbids it) ranks share the
machine's loopback.
"""

import contextlib
import ctypes
import errno
import os
import socket
import struct
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

CHOICE = "COURSE_LIB_RANKS_NETWORK"  # "host": ranks keep the machine's network, to reach a server or the internet
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1
OFFLINE = (
    "Ranks have a network of their own and reach neither the internet nor servers on this machine;\n"
    f"if they must, set {CHOICE}=host in the notebook's environment before its first launch."
)
UNREACHED = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ECONNREFUSED)
_has_left = False  # this process, or the one that forked it


def leave_shared_network() -> None:
    """Give this process, which has one thread, a loopback that it shares with its children alone, if it can."""
    global _has_left
    if _reason_to_stay() is None and _works(_leave):
        with contextlib.suppress(OSError):  # a thread that a library has started: then all stays as it is
            _leave()
            _has_left = True


def join_own_network(store: "dist.Store", rank: int, world_size: int) -> str | None:
    """Bring all ranks of this machine into one network of their own, or none of them; return why not, or None.

    A child of rank 0 makes the network, and ends when all have joined it. Ranks meet in `store`, which must need no
    network itself and be open to this user alone.
    """
    holder, reason = None, _reason_to_stay() or _reason_of_threads()
    if rank == 0:
        holder = None if reason else _Holder()
        store.set("network", holder.place if holder else "")
    place = store.get("network").decode()
    if place and not reason and not _works(partial(_join, place)):
        reason = "the system forbids it"
    store.set(f"network/{rank}", reason or ("" if place else "the system forbids it"))
    reasons = [store.get(f"network/{other}").decode() for other in range(world_size)]
    if not any(reasons):
        _join(place)
        store.set(f"network/in/{rank}", "")
    if holder is not None:
        if not any(reasons):
            store.wait([f"network/in/{other}" for other in range(world_size)])
        holder.end()
    return next(filter(None, reasons), None)


class _Holder:
    """A child process that has a network of its own, for others to join, until it is ended or its parent is gone."""

    def __init__(self) -> None:
        told, tell = os.pipe()
        wait, self._end = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._end)
                with contextlib.suppress(OSError):
                    _leave()
                    os.write(tell, f"{os.getpid()} {os.stat('/proc/self/ns/net').st_ino}".encode())
                os.close(tell)
                os.read(wait, 1)  # until the other end is closed
            finally:
                os._exit(0)
        os.close(tell)
        os.close(wait)
        self.place = os.read(told, 100).decode()  # process and network; nothing where it could make none
        os.close(told)

    def end(self) -> None:
        os.close(self._end)
        os.waitpid(self._pid, 0)


def _join(place: str) -> None:
    """Enter the network of that process, if it still is the one that it has told."""
    pid, network = map(int, place.split())
    libc = ctypes.CDLL(None, use_errno=True)
    kinds = {"net": CLONE_NEWNET} if os.geteuid() == 0 else {"user": CLONE_NEWUSER, "net": CLONE_NEWNET}
    handles = {kind: os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in kinds}
    try:
        if os.fstat(handles["net"]).st_ino != network:
            raise OSError(errno.ESRCH, "another process has the number of the one with the network")
        for kind, flag in kinds.items():
            if libc.setns(handles[kind], flag) != 0:
                raise OSError(ctypes.get_errno(), "the network cannot be joined")
    finally:
        for handle in handles.values():
            os.close(handle)


def _reason_to_stay() -> str | None:
    if sys.platform != "linux":
        return "only Linux has networks of a process"
    return f"{CHOICE}=host" if os.environ.get(CHOICE) == "host" else None


def _reason_of_threads() -> str | None:
    if len(os.listdir("/proc/self/task")) == 1:
        return None
    return "a process with threads cannot leave it: set OMP_NUM_THREADS=1 and OPENBLAS_NUM_THREADS=1"


def _works(act: Callable[[], None]) -> bool:
    """Try it in a child: a process that got only half of it could not go back."""
    child = os.fork()
    if child == 0:
        try:
            act()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def hint_for(error: BaseException | None) -> str:
    """OFFLINE, if something outside was not reached from a network of its own: `error`, or what it came from; or ""."""
    seen = set()
    while _has_left and error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, socket.gaierror) or (isinstance(error, OSError) and error.errno in UNREACHED):
            return OFFLINE
        error = error.__cause__ or error.__context__
    return ""


def _leave() -> None:
    import fcntl  # not on Windows, where this module is read too

    uid, gid = os.geteuid(), os.getegid()
    # As root no user namespace: files of other users would be out of reach there.
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET if uid == 0 else CLONE_NEWNET | CLONE_NEWUSER) != 0:
        raise OSError(ctypes.get_errno(), "no network namespace")
    if uid != 0:
        for name, content in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(content)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(handle, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(handle, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))
