"""The memory that this process may use."""

import psutil
import pytest

from course_lib.launch.limits import usable_memory

GIB = 2**30


def group(folder, limit, used, cache, names):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in zip(names, (limit, used, f"anon 1\n{names[2]} {cache}"), strict=True):
        (folder / (name if "." in name else "memory.stat")).write_text(f"{text}\n")


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


@pytest.mark.parametrize(
    ("line", "base", "names", "no_limit"),
    [("4:cpu,memory:/jobs/7", "memory", V1, 2**63 - 4096), ("0::/jobs/7", "", V2, "max")],
)
def test_the_tightest_limit_of_a_process_s_groups_counts_and_file_cache_is_free(tmp_path, line, base, names, no_limit):
    process, mounted_at = tmp_path / "cgroup", tmp_path / "fs"
    process.write_text(f"9:pids:/other\n{line}\n")
    group(mounted_at / base / "jobs" / "7", no_limit, GIB, 0, names)
    group(mounted_at / base / "jobs", GIB, GIB // 2, GIB // 4, names)
    assert usable_memory(process, mounted_at) == (GIB, 3 * GIB // 4)


def test_a_container_sees_its_own_group_as_the_root_and_other_systems_have_none(tmp_path):
    process = tmp_path / "cgroup"
    process.write_text("0::/docker/not/visible/here\n")
    group(tmp_path / "fs", GIB, GIB * 2, 0, V2)
    assert usable_memory(process, tmp_path / "fs") == (GIB, 0)
    assert usable_memory(tmp_path / "none", tmp_path / "fs")[0] == psutil.virtual_memory().total
