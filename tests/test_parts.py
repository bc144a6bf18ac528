"""What CI takes in parts: every name is of exactly one of them."""

import pytest
from parts import in_parts_as, of_this_part, this_part


@pytest.mark.parametrize("count", [1, 4, 12])
def test_every_name_is_of_exactly_one_part(count, monkeypatch):
    names = [f"case {number}" for number in range(11)]
    found = []
    for number in range(1, count + 1):
        monkeypatch.setenv("PART", f"{number}/{count}")
        found += of_this_part(names)
    assert sorted(found) == sorted(names)


def test_without_a_part_all_of_it_runs(monkeypatch):
    monkeypatch.delenv("PART", raising=False)
    assert of_this_part("abc") == ["a", "b", "c"]


@pytest.mark.parametrize("said", ["0/4", "5/4", "2", "x/4", "1/0", "1/-4"])
def test_what_is_no_part_is_refused(said, monkeypatch):
    monkeypatch.setenv("PART", said)
    with pytest.raises(ValueError, match="try PART=1/12"):
        this_part()


@pytest.fixture(scope="module")
def shared():
    return "a launch, say"


def test_what_is_in_parts_goes_by_itself(request):
    assert in_parts_as(request.node) is None
    request.node.add_marker(pytest.mark.exhaustive)
    assert in_parts_as(request.node) == request.node.nodeid


def test_tests_that_share_a_launch_are_of_one_part(shared, request):
    assert in_parts_as(request.node) is None
    request.node.add_marker(pytest.mark.long)
    assert in_parts_as(request.node) == str(request.path)
