"""Cells that mirror the package: drift is found, and `make mirrors` fixes it."""

import pytest
from nbformat.v4 import new_code_cell, new_notebook

from course_lib import authoring

PACKAGE = '''"""A module."""

WORLD = (1, 2, 4)


@staticmethod
def trips(world_size: int) -> int:
    """How many trips a ring makes.

    Bytes    nothing is sent
    """
    # each rank but one
    return 2 * (world_size - 1)


class Ring:
    """A ring.

    Of ranks.
    """

    def size(self):
        """Its size."""
        return 4
'''


@pytest.fixture
def root(tmp_path):
    (tmp_path / "course_lib").mkdir()
    (tmp_path / "course_lib" / "ring.py").write_text(PACKAGE)
    (tmp_path / "notebooks").mkdir()
    return tmp_path


def mirror(source: str, *names: str):
    header = "# mirrors: " + ", ".join(f"course_lib.ring.{name}" for name in names)
    return new_code_cell(f"{header}\n{source}", id="the-ring", metadata={"tags": ["mirror"]})


def test_package_source_keeps_comments_and_the_first_line_of_each_docstring(root):
    text = authoring.package_source("course_lib.ring.trips", root)
    assert text.startswith("@staticmethod\ndef trips(world_size: int) -> int:\n")
    assert '    """How many trips a ring makes."""\n    # each rank but one\n' in text
    assert "Bytes" not in text
    assert '"""A ring."""' in authoring.package_source("course_lib.ring.Ring", root)
    assert authoring.package_source("course_lib.ring.WORLD", root) == "WORLD = (1, 2, 4)"


def test_a_name_that_is_not_in_the_package_is_told(root):
    with pytest.raises(ValueError, match="course_lib.ring.tripz is not defined at the top level of course_lib.ring"):
        authoring.package_source("course_lib.ring.tripz", root)
    assert "not defined" in authoring.mirror_problems(mirror("", "tripz"), root)[0]


def test_comments_and_docstrings_that_are_left_out_are_set_aside_and_anything_else_is_drift(root):
    same = "@staticmethod\ndef trips(world_size: int) -> int:\n    return 2 * (world_size - 1)  # two trips"
    assert authoring.mirror_problems(mirror(same, "trips"), root) == []
    for changed in (same.replace("2 *", "1 *"), same.replace("@staticmethod\n", ""), same.replace(" -> int", "")):
        assert "differs from course_lib.ring.trips" in authoring.mirror_problems(mirror(changed, "trips"), root)[0]


def test_a_docstring_is_the_beginning_of_the_package_s_however_it_is_wrapped(root):
    def told(docstring):
        source = (
            f'@staticmethod\ndef trips(world_size: int) -> int:\n    """{docstring}"""\n    return 2 * (world_size - 1)'
        )
        return authoring.mirror_problems(mirror(source, "trips"), root)

    assert told("How many trips\n    a ring makes.") == told("How many trips.") == []
    assert "differs from course_lib.ring.trips" in told("How many bytes a ring sends.")[0]


def test_tag_and_first_line_go_together(root):
    tagged = new_code_cell("x = 1", id="x", metadata={"tags": ["mirror"]})
    untagged = mirror("", "trips")
    untagged.metadata.tags = []
    for cell in (tagged, untagged):
        assert "go together" in authoring.mirror_problems(cell, root)[0]


def test_make_mirrors_rewrites_what_drifted_and_leaves_the_rest_of_the_cell(root):
    drifted = "@staticmethod\ndef trips(n):\n    return n\n\n\nassert trips(4) == 6\n"
    nb = new_notebook(cells=[mirror(drifted, "trips", "Ring"), new_code_cell("1 + 1", id="sum")])
    path = root / "notebooks" / "00_x.ipynb"
    authoring.write(authoring.normalise(nb), path)
    assert authoring.rewrite_mirrors(root) == [path]
    cell = authoring.read(path).cells[0]
    assert authoring.mirror_problems(cell, root) == []
    assert cell.source.endswith("assert trips(4) == 6")
    assert cell.source.index("class Ring") < cell.source.index("assert trips")
    assert authoring.rewrite_mirrors(root) == [], "a second call changes nothing"


def test_a_name_without_a_dot_stands_in_the_module_of_the_one_before():
    cell = new_code_cell("# mirrors: course_lib.ring.trips, Ring, course_lib.hub.send, recv")
    names = ["course_lib.ring.trips", "course_lib.ring.Ring", "course_lib.hub.send", "course_lib.hub.recv"]
    assert authoring.mirrored_names(cell) == names
