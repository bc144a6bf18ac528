"""`course lab`: the sheet of a chapter's lab, or its form with what was measured.

course lab 05 --gpu a100-80g --nodes-link ib-hdr200 > lab05.md
course lab 05 --measured lab05.json
course lab 05 --answers
"""

from pathlib import Path

from tyro.conf import OmitArgPrefixes, Positional

from course_lib.labs.answers import answer_sheet
from course_lib.labs.sheet import Nodes, form, sheet
from course_lib.labs.table import LABS, lab_named
from course_lib.language import told
from course_lib.validate import read_json, writable


def lab(
    chapter: Positional[str],
    machine: OmitArgPrefixes[Nodes] = Nodes(),
    measured: Path | None = None,
    folder: Path | None = None,
    answers: bool = False,
) -> int:
    """Print a lab sheet: what to submit on a cluster, what to measure, what it should show.

    Args:
        chapter: 00 to 12, or all
        machine: a lab of one GPU, 01 or 02, takes one of it
        measured: the JSON that `python -m course_lib.labs` wrote: print it beside what is modelled
        folder: write the sheet there, as 05.md, rather than print it; answers as 05-answers.md
        answers: for who marks it, the answers to the sheet's questions, computed for this machine
    """
    labs = list(LABS.values()) if chapter == "all" else [lab_named(chapter)]
    if measured is not None:
        if len(labs) > 1 or not measured.is_file():
            raise ValueError(f"there is no file {measured} of one lab; give a chapter and the file of its lab")
        found = read_json(measured)
        if not isinstance(found, dict):
            raise ValueError(f"{measured} is no file of a lab; write one with: python -m course_lib.labs")
        print(form(labs[0], found, machine))
        return 0
    if folder is not None:
        writable("folder", folder)
    for one in labs:
        text = (answer_sheet if answers else sheet)(one, machine)
        if folder is None:
            print(text)
        else:
            (folder / f"{one.chapter}{'-answers' * answers}.md").write_text(told(text), encoding="utf-8")
    return 0
