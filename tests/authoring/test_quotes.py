"""Numbers in prose that an output above prints: recorded by `make quotes`, and told when either changes."""

import copy
import random

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from course_lib import authoring
from course_lib.authoring.exercises import exercise_from
from course_lib.authoring.quotes import (
    NUMBER,
    is_printed,
    numbers_in,
    quote_problems,
    quotes_of,
    record_quotes,
    write_quotes,
)

PRINTED = "states: 60,000 bytes, 9.24 %, share 0.5; change -0.25\n"
PROSE = "**What you saw.** 60,000 bytes, $9.2\\,\\%$, and −0.25. Section 9.24 and `60000` are no quotes."


def section(prose=PROSE, printed=PRINTED):
    outputs = [new_output("stream", name="stdout", text=printed)]
    cells = [new_code_cell("f()", id="f", outputs=outputs), new_markdown_cell(prose, id="f-saw")]
    return new_notebook(cells=cells)


def recorded(nb):
    record_quotes(nb)
    return nb


def test_a_number_is_the_same_with_separators_in_latex_and_with_a_typographic_minus():
    assert numbers_in("1,024 and $1{,}024$ and −0.5, -0.5, 2^10, H100, 9a, 7 and 2024.") == [
        "1024",
        "1024",
        "-0.5",
        "-0.5",
    ]


def test_a_whole_number_below_100_counts_in_prose_with_a_unit_alone():
    prose = "16 bytes, 43 %, $43\\,\\%$, 27 GB, 16 ranks, 116 rows"
    assert numbers_in(prose, prose=True) == ["43", "43", "27", "116"] and len(numbers_in(prose)) == 6


def test_prose_may_round_what_is_printed_and_say_its_sign_in_words():
    assert is_printed("9.2", {"9.24"}) and is_printed("0.25", {"-0.25"}) and is_printed("85", {"85.0"})
    assert not is_printed("9.3", {"9.24"}) and not is_printed("-0.25", {"0.25"}) and not is_printed("9.240", {"9.24"})


def test_what_stands_in_an_output_of_the_section_is_recorded_and_make_fmt_keeps_it():
    nb = authoring.normalise(recorded(section()))
    assert nb.cells[1].metadata == {"quotes": "60000 9.2 -0.25"} and quote_problems(nb) == []
    assert "quotes" not in exercise_from(nb).cells[1].metadata


def test_a_heading_ends_what_is_compared():
    assert "quotes" not in recorded(section("## Next\n\n60,000")).cells[1].metadata


@pytest.mark.parametrize(
    ("prose", "printed", "says"),
    [
        (PROSE.replace("60,000", "60,100"), PRINTED, "its prose no longer says 60000; if that is right, `make quotes`"),
        (PROSE, PRINTED.replace("9.24", "9.34"), "its prose says 9.2, which no output above prints any more"),
        (PROSE + " 0.5", PRINTED, "`make quotes` records 0.5, printed above and said here"),
    ],
)
def test_a_number_that_changed_or_is_new_is_named_with_its_cell(prose, printed, says):
    before, nb = recorded(section()), section(prose, printed)
    nb.cells[1].metadata = before.cells[1].metadata
    assert quote_problems(nb) == [f"cell f-saw: {says}"]


def test_recording_again_forgets_no_number_that_the_prose_still_says(tmp_path):
    nb = recorded(section())
    nb.cells[0].outputs[0].text = PRINTED.replace("60,000", "60,100")
    nb.cells[1].source = PROSE.replace("0.25", "one quarter")
    (tmp_path / "notebooks").mkdir()
    path = tmp_path / "notebooks" / "00_x.ipynb"
    authoring.write(nb, path)
    assert write_quotes(tmp_path) == [path] and write_quotes(tmp_path) == []
    assert authoring.read(path).cells[1].metadata["quotes"] == "60000 9.2"
    assert quote_problems(authoring.read(path)) == [
        "cell f-saw: its prose says 60000, which no output above prints any more"
    ]


# Planted in the course's own notebooks


def another(digits: str) -> str:
    """The same number with another first digit."""
    first = next(sign for sign in digits if sign in "123456789")
    return digits.replace(first, str(int(first) % 9 + 1), 1)


def with_another(text: str, is_meant) -> str:
    """A text in which each number that is meant has another first digit."""
    return NUMBER.sub(lambda found: another(found[1]) if any(map(is_meant, numbers_in(found[1]))) else found[0], text)


def change_outputs(cells, number: str) -> None:
    """Print another number wherever a quoted one is printed."""
    for output in [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]:
        texts = output if output.output_type == "stream" else output.get("data", {})
        for kind in {"text", "text/plain", "text/html"} & set(texts):
            texts[kind] = with_another(texts[kind], lambda printed: is_printed(number, {printed}))


def test_ten_numbers_changed_in_prose_and_ten_in_outputs_are_each_noticed():
    notebooks = [recorded(authoring.read(path)) for path in authoring.notebook_paths("notebooks")]
    quotes = [
        (nb, place, number)
        for nb in notebooks
        for place, cell in enumerate(nb.cells)
        for number in quotes_of(cell)
        if with_another(cell.source, lambda said, number=number: said == number) != cell.source
    ]
    assert len(quotes) > 300 and not any(map(quote_problems, notebooks))
    draws = random.Random(11)
    for nb, place, number in draws.sample(quotes, 10):
        planted = copy.deepcopy(nb)
        cell = planted.cells[place]
        cell.source = with_another(cell.source, lambda said, number=number: said == number)
        assert any(f"cell {cell['id']}: its prose no longer says {number};" in line for line in quote_problems(planted))
    for nb, place, number in draws.sample(quotes, 10):
        planted = copy.deepcopy(nb)
        change_outputs(planted.cells[:place], number)
        says = f"cell {nb.cells[place]['id']}: its prose says {number}, which no output above prints any more"
        assert says in quote_problems(planted)
