"""An environment with the newest packages: the wheel replaces none of them, and two chapters run."""

import sys

import pytest
from places.environments import environment, run
from places.test_colab import expected_failures, failures

from course_lib.authoring import ROOT, read

CHAPTERS = ("00_ranks_and_collectives", "03_data_parallel")


@pytest.fixture(scope="module")
def newest(wheel, tmp_path_factory):
    yield from environment(sys.executable, "newest", wheel, tmp_path_factory.mktemp("newest"))


def test_the_wheel_leaves_the_newest_torch(newest):
    assert {name: newest.after[name] for name in newest.before} == newest.before
    print(f"\nthe newest torch here is {newest.before['torch']}")


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_runs_with_the_newest_packages(newest, chapter):
    path = newest.course / "notebooks" / f"{chapter}.ipynb"
    nb = newest.execute(read(path), path.parent)
    assert failures(nb).keys() == expected_failures(nb), failures(nb)


def test_what_is_counted_and_what_differs_between_versions_holds_for_the_newest_torch(newest):
    tests = ("tests/measure/test_meter.py", "tests/test_compat.py")
    run(newest.python, "-m", "pytest", "-p", "no:cacheprovider", *tests, cwd=ROOT)
