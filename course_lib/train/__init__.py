"""The trainer: any layout, under torchrun, accelerate, srun or in a launch; from its last checkpoint.

plan.py          what a run is asked to do: steps, learning rate, random numbers, checkpoints
options.py       the command line as records
log.py           a run's log: JSON lines that can be read whenever the run was killed
stop.py          asked to stop by a signal: all ranks after the same step, and the exit code says so
trainer.py       the run itself
export.py        its choices as configs of Accelerate and DeepSpeed
__main__.py      python -m course_lib.train
"""

from course_lib.train.plan import Checkpoints, TrainPlan
