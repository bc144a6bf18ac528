"""The processes of a rank: itself and all that it has started, which are one process group."""

import contextlib
import os
import signal
import time
from collections.abc import Iterable

import psutil

TRACKER_S = 1.0  # for removing shared memory


def end_groups(leaders: Iterable[int]) -> None:
    """End the process groups of ranks, and see that no shared memory of theirs is left.

    Python's tracker of shared memory is a process of the rank's too. It removes what has been left and ends by itself,
    once all others are gone; ended with them, it could not.
    """
    groups = [leader for leader in leaders if _is_there(leader)]
    give_up = time.monotonic() + TRACKER_S
    while groups and (members := members_of(groups)) and time.monotonic() < give_up:
        kill_all_but_trackers(members)
        time.sleep(0.005)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says EPERM for a group of zombies
            os.killpg(group, signal.SIGKILL)


def end_own_group() -> None:
    """End this rank and the processes it has started."""
    if hasattr(os, "killpg") and os.getpgid(0) == os.getpid():
        kill_all_but_trackers([member for member in members_of([os.getpid()]) if member.pid != os.getpid()])
    os._exit(1)


def members_of(groups: Iterable[int]) -> list[psutil.Process]:
    """The living processes of these groups."""
    wanted, members = set(groups), []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):  # it has just ended
            if os.getpgid(pid) in wanted and (member := psutil.Process(pid)).status() != psutil.STATUS_ZOMBIE:
                members.append(member)
    return members


def kill_all_but_trackers(members: Iterable[psutil.Process]) -> None:
    for member in members:
        with contextlib.suppress(psutil.Error):  # it has just ended
            if not any("multiprocessing.resource_tracker" in word for word in member.cmdline()):
                member.kill()


def _is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
