"""A world of ranks from a notebook cell: `launch(fn, world_size, *args)` -> what each rank returned.

launcher.py      launch, its results and its checks
limits.py        the memory, cores and processes that this process may use
rendezvous.py    who am I, by what torchrun, accelerate or srun set, and the world joined
_rank.py         inside one rank: prepare the process, call the function, report
_turn.py         a turn among all launches of the machine: wait, saying behind whom, or be refused
_processes.py    where ranks come from: a fork server
_fork_server.py  the process that ranks are forked from
_groups.py       a rank's processes, ended so that no shared memory is left
_network.py      a network of their own for ranks, where the system allows it
_watch.py        the notebook's side of a launch: listen until all are done, one failed, or time is up
_bar.py          how far a launch or a loop is, below the cell or in the terminal
_failures.py     from what ranks reported to one readable error
_slurm.py        the same launch as a Slurm job: hand it in, wait, listen, cancel
_slurm_node.py   what each task of that job does: be a rank's host, and the rank
_file_link.py    messages through files that all nodes see
"""

from course_lib.devices import choose_backend
from course_lib.launch.launcher import RankError, Results, Slurm, launch, progress, report
from course_lib.launch.limits import usable_memory
