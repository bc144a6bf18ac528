"""The command `course`.

commands.py      the subcommands and their options; none needs torch to tell its help
help.py          `--help` in the reader's language
doctor.py        what this machine can run
notebooks.py     a chapter without a browser; notebooks in a folder of the learner's
demo.py          one table: one process against 2 and 4 ranks
asked.py         words that plan, predict and simulate share: tokens, models, GPUs, links, techniques
plan.py          `course plan`: the fastest layout that fits, and why
predict.py       `course predict`, `course calibrate`: what runs of a table would show on a cluster
cluster.py       `course cluster`: a site written down, and looked at before a long job
gpu_report.py    `course gpu-report`: what `make gpu-day` measured on a GPU, as docs/GPU.md
lab.py           `course lab`: what to run on a cluster for a chapter, and what was measured beside the model
grade.py         `course grade`: points of a class, without asking the submissions' kernels
claims.py        `course claims`: claims that circulate, recomputed
watch.py         `course watch`: a run's ranks in a table, while they train
simulate.py      a layout of any size, stage by stage, against a GPU's memory
"""

from course_lib.cli.commands import main
