"""Labs: what to run on a real cluster for each chapter, and the measured values beside the modelled ones.

labs.toml        the labs: what is compared, questions with their answers
table.py         a lab as a record: its layouts on so many ranks, its model
sheet.py         a lab's sheet as Markdown, and the form with what was measured; all from the table
answers.py       for who marks a lab: its answers as the package computes them, and what gives how many marks
measure.py       what ranks measure: a step of each layout of a lab, or each way to sum
gpu_day.py       the table of a day on GPUs: rows that no stop loses, and the page made of it
__main__.py      python -m course_lib.labs 05: a lab under torchrun, srun, accelerate or alone

What is imported here needs no torch.
"""

from course_lib.labs.sheet import Nodes, form, sheet
from course_lib.labs.table import LABS, Lab, lab_named
