"""`course cluster init` and `course cluster check`: a site written down once, and looked at before a long job.

course cluster init site --partition gpu --gpus-per-node 8 --interface ib0 --module cuda/12.8
sbatch site/check.sbatch
torchrun --nproc-per-node 4 -m course_lib.cluster --layout dp=2,tp=2
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes, Positional, UseAppendAction, subcommand

from course_lib.cluster.options import Check
from course_lib.cluster.site import Site, write_site


@dataclass(frozen=True)
class Init:
    """Write site.toml, train.sbatch and check.sbatch into a folder. Nothing is asked."""

    folder: Positional[Path] = Path()  # made if it is not there
    site: OmitArgPrefixes[UseAppendAction[Site]] = field(default_factory=Site)
    force: bool = False  # overwrite what is there


def cluster(
    do: OmitSubcommandPrefixes[Annotated[Init, subcommand("init")] | Annotated[Check, subcommand("check")]],
) -> int:
    """Write down what your cluster is like, or look at its nodes, GPUs and links before a long job."""
    if isinstance(do, Check):
        from course_lib.cluster.__main__ import run_as_script

        run_as_script(do)
    for path in write_site(do.site, do.folder, do.force):
        print(path)
    print("change what is not as on your cluster, then: sbatch check.sbatch")
    return 0
