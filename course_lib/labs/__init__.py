"""Labs: what to run on a real cluster for chapters 03 to 10, and the measured values beside the modelled ones.

table.py         the labs: layouts to compare, model, questions
sheet.py         a lab's sheet as Markdown, and the form with what was measured; all from the table
measure.py       what ranks measure: a step of each layout of a lab
__main__.py      python -m course_lib.labs 05: a lab under torchrun, srun, accelerate or alone

What is imported here needs no torch.
"""

from course_lib.labs.sheet import Machine, form, sheet
from course_lib.labs.table import LABS, Lab, lab_named
