"""Before a long job: what a site is like, and whether its nodes, GPUs and links are well.

site.py          site.toml, and the batch scripts and allocations that come from it
pods.py          the same job as pods of Kubernetes
measure.py       what one rank measures: its computing, collectives along each axis, links, clocks, a shared folder
gpus.py          what NVML tells of this rank's GPU: errors, clocks, what slows it, temperature
judge.py         from all ranks' measurements to a table, the faults by name and one finding
failures.py      how often to save when GPUs fail: lost work against the time of saving
options.py       the command line of the check
__main__.py      python -m course_lib.cluster: the check under torchrun, srun or alone

Ranks call `measure.check_cluster`. What is imported here needs no torch.
"""

from course_lib.cluster.judge import Limits, Report, judge
from course_lib.cluster.pods import jobset
from course_lib.cluster.site import Site, batch_script, read_site, write_site
