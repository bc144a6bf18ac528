"""Which layout to train with: every one that divides is a candidate, what does not fit falls out, the fastest leads.

job.py           what is asked: a model, GPUs, a sequence, a batch; one layout worked out
space.py         the layouts that divide
search.py        the search, fastest first; the choice; the front of memory against MFU; what was nearest and lost
measured.py      some measured runs, by which an advice is judged
explain.py       why: fit, batch, throughput
techniques.py    what each technique splits and sends, its layout of a job; the table of the index
sheet.py         one job of the learner's through all chapters: what each technique would hold, send, wait for
config_files.py  a layout as other programs' files, or why one cannot do it
"""

from course_lib.plan.config_files import export
from course_lib.plan.explain import explain, options_table
from course_lib.plan.job import Job, work_out
from course_lib.plan.search import Plan, search
