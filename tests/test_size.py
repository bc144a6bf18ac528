"""The budget: docs/SIZE.md has the lines of each folder, and a folder grows only by a commit that says why."""

import size


def test_no_folder_has_more_lines_than_its_budget():
    allowed = size.budgets(size.PAGE.read_text(encoding="utf-8"))
    grown = {
        name: f"{n} lines for {allowed.get(name, 0)}" for name, n in size.counted().items() if n > allowed.get(name, 0)
    }
    assert grown == {}, "take lines away, or raise the budget (make size) in a commit that says why"


def test_a_line_more_is_seen_in_its_folder_and_in_all(tmp_path):
    for name in ("course_lib/run.py", "course_lib/plots/a.py", "tests/test_a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n2\n")
    before = size.counted(tmp_path)
    assert before == {"course_lib": 4, "course_lib/*.py": 2, "course_lib/plots": 2, "tests": 2, "tests/*.py": 2}
    assert size.budgets(size.page(before)) == before
    (tmp_path / "course_lib" / "plots" / "b.py").write_text("3\n")
    after = size.counted(tmp_path)
    assert {name for name in after if after[name] > before[name]} == {"course_lib", "course_lib/plots"}
