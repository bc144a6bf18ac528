"""A launch among those of others: it waits and says behind whom, or is refused, and nothing broken holds it up."""

import fcntl
import getpass
import os
import re
import subprocess
import sys
import time

import pytest
import torch
from namespaces import NOBODY, as_another_user

from course_lib.launch import _turn, launch
from course_lib.launch._turn import take_turn

pytestmark = pytest.mark.launches


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of launches with nobody in it, on a machine for 8 ranks at once."""
    monkeypatch.setenv(_turn.FOLDER, str(tmp_path / "launches"))
    monkeypatch.setenv(_turn.LIMIT, "8")
    with take_turn(1, pytest.fail):
        (own,) = (tmp_path / "launches").iterdir()
        assert re.fullmatch(rb"\d+ 1 \d+ r\n", own.read_bytes())
    assert not any((tmp_path / "launches").iterdir())
    yield tmp_path / "launches"
    while Other.living:
        Other.living[0].end()


class Other:
    """The file of a launch of another process, as this process sees it."""

    living = []  # noqa: RUF012 - a file that nobody holds is closed, and so unlocked

    def __init__(self, folder, text, name="launch-other", age_s=60):
        self.path = folder / name
        self.path.write_text(text)
        os.utime(self.path, (time.time() - age_s,) * 2)
        self.file = self.path.open()
        fcntl.flock(self.file, fcntl.LOCK_EX)
        self.living.append(self)

    def end(self):
        self.living.remove(self)
        self.file.close()


def sentences_until_it_starts(ranks, *, then):
    """What a launch says while it waits; `then` is what happens after its first sentence."""
    said = []
    with take_turn(ranks, lambda sentence: (said.append(sentence), then())):
        return said


def test_who_shares_the_machine_can_add_a_file_and_remove_none_of_others(folder):
    assert folder.stat().st_mode & 0o7777 == 0o1777


def test_a_launch_that_fits_beside_others_starts_at_once_and_knows_how_many_ranks_they_have(folder):
    Other(folder, "5 3 4711 r\n")
    with take_turn(5, pytest.fail) as taken:
        assert taken == 3


def test_a_launch_waits_and_says_behind_whose_ranks_since_when_and_why(folder):
    first, _ = Other(folder, "5 6 4711 r\n"), Other(folder, "6 1 4712 r\n", "launch-second")
    at = time.strftime("%H:%M:%S", time.localtime(first.path.stat().st_mtime))
    assert sentences_until_it_starts(4, then=first.end) == [
        f"this launch of 4 ranks waits behind {getpass.getuser()}'s of 6 ranks (process 4711, since {at}) and 1 more "
        "launch: at most 8 ranks run at once on this machine, in the order in which they came"
    ]


def test_a_small_launch_does_not_overtake_a_large_one_that_waits(folder):
    Other(folder, "5 4 4711 r\n")
    large = Other(folder, "6 8 4712 w\n", "launch-large")
    (said,) = sentences_until_it_starts(1, then=large.end)
    assert "behind" in said and "process 4711" in said and "1 more launch:" in said


def test_a_launch_that_came_later_is_not_waited_for(folder):
    first = Other(folder, "5 8 4711 r\n")
    later = f"{time.time_ns() + 10**9} 8 4712 w\n"
    assert len(sentences_until_it_starts(8, then=lambda: (first.end(), Other(folder, later, "launch-later")))) == 1


@pytest.mark.parametrize(
    "text", ["", "x", "5 8 4711", "5 8 4711 r\n\n", "5 99 4711 r\n", "5 0 1 r\n", "-5 8 1 r\n", "9" * 20 + " 8 1 r\n"]
)
def test_a_file_that_says_something_else_holds_nobody_up(folder, text):
    Other(folder, text)
    with take_turn(8, pytest.fail):
        pass


def test_what_the_dead_have_left_is_removed_and_links_pipes_and_folders_are_left_alone(folder, tmp_path):
    (folder / "launch-dead").write_text("5 8 4711 r\n")
    elsewhere = Other(tmp_path, "5 8 4711 r\n")
    (folder / "launch-link").symlink_to(elsewhere.path)
    os.mkfifo(folder / "launch-pipe")
    (folder / "launch-folder").mkdir()
    with take_turn(8, pytest.fail):
        pass
    assert {path.name for path in folder.iterdir()} == {"launch-link", "launch-pipe", "launch-folder"}


def test_a_folder_that_cannot_be_used_holds_nobody_up(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    for name in ("file", "file/below", "nowhere/below", "link"):
        monkeypatch.setenv(_turn.FOLDER, str(tmp_path / name))
        with take_turn(8, pytest.fail):
            pass
    assert not any((tmp_path / "folder").iterdir())


def test_who_holds_the_folder_s_own_lock_delays_a_launch_by_moments(folder, monkeypatch):
    monkeypatch.setattr(_turn, "_GATE_S", 0.05)
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with take_turn(8, pytest.fail):
        os.close(descriptor)


def test_a_launch_that_waits_too_long_is_refused(folder, monkeypatch):
    monkeypatch.setattr(_turn, "_PATIENCE_S", 0.1)
    Other(folder, "5 8 4711 r\n")
    with pytest.raises(ValueError, match=r"waits behind .*process 4711.* for 0 s; launch again"):
        sentences_until_it_starts(1, then=lambda: None)
    assert [path.name for path in folder.iterdir()] == ["launch-other"]


@pytest.mark.parametrize(
    ("name", "free", "text"),
    [
        ("usable_memory", (2**40, 300 << 20), "600 MiB of memory are needed, 300 free"),
        ("_free_shm_bytes", 2 << 20, "4 MiB of /dev/shm are needed, 2 free"),
        ("usable_processes", 20, "32 processes and threads are needed, 20 more are allowed"),
    ],
)
def test_what_is_not_free_is_waited_for_where_others_run_and_refused_where_nobody_does(
    folder, monkeypatch, name, free, text
):
    monkeypatch.setattr(_turn, name, lambda: free)
    with pytest.raises(ValueError, match=f"a launch of 4 ranks was asked, and {text}; use fewer ranks, or end what"):
        sentences_until_it_starts(4, then=lambda: None)
    Other(folder, "5 1 4711 r\n")
    (said,) = sentences_until_it_starts(4, then=lambda: monkeypatch.undo())
    assert said.endswith(f": {text}")


def test_memory_that_young_ranks_will_take_is_not_free(folder, monkeypatch):
    monkeypatch.setattr(_turn, "usable_memory", lambda: (2**40, 700 << 20))
    young = Other(folder, "5 1 4711 r\n", age_s=0)
    (said,) = sentences_until_it_starts(4, then=lambda: os.utime(young.path, (0, 0)))
    assert "600 MiB of memory are needed, 550 free" in said


def test_more_ranks_than_a_site_allows_are_refused_at_once(folder):
    with pytest.raises(ValueError, match=r"9 ranks was asked, and at most 8 run at once .*\(COURSE_MAX_RANKS=8\); use"):
        launch(print, 9)


@pytest.mark.parametrize("told", ["", "0", "-1", "x", "1.5", "1" * 5000])
def test_a_limit_that_is_no_number_is_refused(monkeypatch, told):
    monkeypatch.setenv(_turn.LIMIT, told)
    with pytest.raises(ValueError, match="COURSE_MAX_RANKS is .* whole number of at least 1"):
        _turn.max_ranks()


def test_without_a_limit_any_launch_may_start_and_a_large_machine_has_four_ranks_a_core(monkeypatch):
    monkeypatch.delenv(_turn.LIMIT, raising=False)
    monkeypatch.setattr(_turn, "usable_cores", lambda: 2)
    assert _turn.max_ranks() == _turn.MOST_RANKS
    monkeypatch.setattr(_turn, "usable_cores", lambda: 32)
    assert _turn.max_ranks() == 128


def test_ranks_have_the_threads_asked_for_alone_and_those_of_free_cores_beside_others(folder):
    assert launch(torch.get_num_threads, 2, threads=3) == [3, 3]
    Other(folder, "5 6 4711 r\n")
    cores = len(os.sched_getaffinity(0))
    assert launch(torch.get_num_threads, 2, threads=3) == [max(1, min(3, (cores - 6) // 2))] * 2


HOLD = """
import sys
from course_lib.launch._turn import take_turn
with take_turn(6, sys.exit):
    print("in", flush=True)
    sys.stdin.read()
"""


@as_another_user
def test_users_of_one_machine_wait_for_one_another_and_the_kill_of_a_holder_ends_its_turn(folder):
    nobody = subprocess.Popen(
        [*NOBODY, sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert nobody.stdout.readline() == "in\n"
    (said,) = sentences_until_it_starts(4, then=lambda: (nobody.kill(), nobody.wait()))
    assert f"behind nobody's of 6 ranks (process {nobody.pid}, since" in said
    assert not any(folder.iterdir())
