"""The graders of the exercises: a folder for each chapter, on a small framework.

core.py          fresh numbers, real ranks, named misconceptions
table.py         an exercise as data: reference, wrong answers with what they are told, inputs
watch.py         what is seen of an answer at work, and when two observations agree
trainers.py      what is seen of a trainer, and trainers that are wrong alike
outside.py       a class graded: checks from the release, answers from submissions
apart.py         the processes in which answers run then
plain.py         values as bytes that hold data and no code
ch00/ ... ch12/  the graders of a chapter; `from course_lib.checks.ch00 import check_...`
"""

from course_lib.checks.core import CheckFailed, but, fresh_generator, fresh_seed, numbers, ranks_and_seeds
from course_lib.checks.table import Exercise, Stops, pairs
from course_lib.checks.watch import Cost, Each, agree, copied, named, on_ranks, result, several
