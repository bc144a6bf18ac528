"""Notebooks as source code: one normal form, cells that mirror the package, exercises made from solutions.

CONTRIBUTING.md says how a chapter is made; tests/test_notebooks.py holds every notebook to `notebook_problems`.

address.py    where the course is had from: install cell and badges
form.py       the one form in which a notebook is stored
columns.py    comments and docstrings of cells within 88 columns
links.py      the line of links between the notebooks
mirrors.py    cells held to the package
exercises.py  exercises from solutions
quotes.py     numbers in prose that stand in an output above
rules.py      what a notebook must satisfy
lessons.py    what a lesson must keep to
slides.py     a deck of slides for each lesson
wheel.py      the wheel for Colab: without notebooks and weights
korean.py     the Korean edition, from a catalogue for each notebook
__main__.py   fmt, mirrors, exercises, quotes, korean, check, korean-status, address; docs/MAP.md and docs/CLAIMS.md
"""

from course_lib.authoring.columns import without_magics
from course_lib.authoring.exercises import exercise_from, exercise_problems, write_exercises
from course_lib.authoring.form import ROOT, code_cells, is_check_cell, normalise, notebook_paths, read, tags_of, write
from course_lib.authoring.mirrors import mirror_problems, mirrored_names, package_source, rewrite_mirrors
from course_lib.authoring.rules import notebook_problems, prose_problems
