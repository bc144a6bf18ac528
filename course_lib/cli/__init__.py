"""The command `course`.

commands.py      the subcommands and their options; none needs torch to tell its help
doctor.py        what this machine can run
notebooks.py     a chapter without a browser; notebooks in a folder of the learner's
demo.py          one table: one process against 2 and 4 ranks
predict.py       `course predict`: what runs of a table would show on a cluster
simulate.py      a layout of any size, stage by stage, against a GPU's memory
"""

from course_lib.cli.commands import main
