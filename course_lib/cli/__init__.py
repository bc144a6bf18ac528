"""The command `course`.

commands.py      course doctor, run, demo, bench, simulate
demo.py          one table: one process against 2 and 4 ranks
simulate.py      a layout of any size, stage by stage, against a GPU's memory
"""

from course_lib.cli.commands import main
