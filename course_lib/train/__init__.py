"""The trainer: any layout, under torchrun, accelerate, srun or in a launch; from its last checkpoint.

plan.py          what a run is asked to do: steps, learning rate, random numbers, checkpoints
options.py       the command line as records
start.py         what a run begins from: weights and text; `speaks` goes on from trained ones
health.py        whether ranks hold the same numbers, and which is slow
step_clock.py    what a rank says of a step: speed, memory, where its seconds went; one step under the profiler
log.py           a run's log: JSON lines that can be read whenever the run was killed
watch.py         what the logs of a run say now: who is slow, has stopped, failed
stop.py          asked to stop by a signal: all ranks after the same step, and the exit code says so
trainer.py       the run itself
__main__.py      python -m course_lib.train
"""

from course_lib.train.plan import Checkpoints, Logs, TrainPlan
