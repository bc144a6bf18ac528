"""The processes of a rank: itself and all that it has started.

They are one process group, but for those that have made a session of their own. These are found as descendants: on
Linux a rank, and the server that forks ranks, adopt what processes below them leave behind. Elsewhere such a process
outlives its rank.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable

import psutil

_TRACKER_S = 1.0  # for removing shared memory
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process, and not init, the parent of what its descendants leave behind, where the system can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_orphans(known: Iterable[int]) -> None:
    """End the children of this process that it has adopted: those that are not known to it."""
    known, give_up = set(known), time.monotonic() + _TRACKER_S
    while orphans := [child for child in psutil.Process().children() if child.pid not in known]:
        _kill_all_but_trackers([*orphans, *_descendants_of(orphans)])
        for child in orphans:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG)
        if time.monotonic() > give_up:
            return
        time.sleep(0.005)


def _descendants_of(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """All that these have started and that has not been left behind."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has just ended
            found += process.children(recursive=True)
    return found


def end_groups(leaders: Iterable[int]) -> None:
    """End the process groups of ranks, and see that no shared memory of theirs is left.

    Python's tracker of shared memory is a process of the rank's too. It removes what has been left and ends by itself,
    once all others are gone; ended with them, it could not.
    """
    groups = [leader for leader in leaders if _is_there(leader)]
    give_up = time.monotonic() + _TRACKER_S
    while groups and (members := _members_of(groups)) and time.monotonic() < give_up:
        _kill_all_but_trackers(members)
        time.sleep(0.005)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says EPERM for a group of zombies
            os.killpg(group, signal.SIGKILL)


def end_own_group() -> None:
    """End this rank and the processes it has started."""
    if os.getpgid(0) == os.getpid():
        own = [*_members_of([os.getpid()]), *_descendants_of([psutil.Process()])]
        _kill_all_but_trackers([member for member in own if member.pid != os.getpid()])
    os._exit(1)


def _members_of(groups: Iterable[int]) -> list[psutil.Process]:
    """The living processes of these groups."""
    wanted, members = set(groups), []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):  # it has just ended
            if os.getpgid(pid) in wanted and (member := psutil.Process(pid)).status() != psutil.STATUS_ZOMBIE:
                members.append(member)
    return members


def _kill_all_but_trackers(members: Iterable[psutil.Process]) -> None:
    for member in members:
        with contextlib.suppress(psutil.Error):  # it has just ended
            if not any("multiprocessing.resource_tracker" in word for word in member.cmdline()):
                member.kill()


def _is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True
