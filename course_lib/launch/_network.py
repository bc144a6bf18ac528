"""A network of their own for the ranks of one notebook, where Linux lets a user make one.

gloo's sockets ask nobody who he is, and loopback is shared by all users of a machine: whoever connects first takes the
place of a rank. In a network namespace of their own ranks see one another and nobody else, and nobody sees them. What
it costs is paid once, when the fork server starts. On macOS, and on a system that forbids it, ranks share the loopback
of the machine.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import socket
import struct
import sys

CHOICE = "COURSE_LIB_RANKS_NETWORK"  # "host": ranks keep the machine's network, to reach a server or the internet
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1
OFFLINE = (
    "Ranks have a network of their own and reach neither the internet nor servers on this machine;\n"
    f"if they must, set {CHOICE}=host in the notebook's environment before its first launch."
)
_UNREACHED = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ECONNREFUSED)
_has_left = False  # this process, or the one that forked it


def leave_shared_network() -> None:
    """Give this process, which has one thread, a loopback that it shares with its children alone, if it can."""
    global _has_left
    if sys.platform == "linux" and os.environ.get(CHOICE) != "host" and _can_leave():
        with contextlib.suppress(OSError):  # a thread that a library has started: then all stays as it is
            _leave()
            _has_left = True


def _can_leave() -> bool:
    """Try it in a child: a process that got only half of it could not go back."""
    child = os.fork()
    if child == 0:
        try:
            _leave()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def hint_for(error: BaseException | None) -> str:
    """OFFLINE, if something outside was not reached from a network of its own: `error`, or what it came from; or ""."""
    seen = set()
    while _has_left and error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, socket.gaierror) or (isinstance(error, OSError) and error.errno in _UNREACHED):
            return OFFLINE
        error = error.__cause__ or error.__context__
    return ""


def _leave() -> None:
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
