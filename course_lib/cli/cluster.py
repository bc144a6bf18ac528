"""`course cluster init` and `course cluster check`: a site written down once, and looked at before a long job.

course cluster init site --partition gpu --gpus-per-node 8 --interface ib0 --module cuda/12.8
sbatch site/check.sbatch
course cluster init site --kind kubernetes --container registry/course --claim shared --nodes 4 --gpus-per-node 1
torchrun --nproc-per-node 4 -m course_lib.cluster --layout dp=2,tp=2
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes, Positional, UseAppendAction, subcommand

from course_lib.cluster.options import Check
from course_lib.cluster.pods import jobset
from course_lib.cluster.site import Site, batch_script, write_site


@dataclass(frozen=True)
class Init:
    """Write site.toml and two jobs, train and check, into a folder: batch scripts, or a JobSet. Nothing is asked."""

    folder: Positional[Path] = Path()  # made if it is not there
    site: OmitArgPrefixes[UseAppendAction[Site]] = field(default_factory=Site)
    force: bool = False  # overwrite what is there
    kind: Literal["slurm", "kubernetes"] = "slurm"  # who starts jobs: sbatch, or kubectl with JobSet


def cluster(
    do: OmitSubcommandPrefixes[Annotated[Init, subcommand("init")] | Annotated[Check, subcommand("check")]],
) -> int:
    """Write down what your cluster is like, or look at its nodes, GPUs and links before a long job."""
    if isinstance(do, Check):
        from course_lib.cluster.__main__ import run_as_script

        run_as_script(do)
    job, suffix = (batch_script, "sbatch") if do.kind == "slurm" else (jobset, "yaml")
    for path in write_site(do.site, do.folder, do.force, job, suffix):
        print(path)
    start = "sbatch check.sbatch" if do.kind == "slurm" else "kubectl apply -f check.yaml"
    print(f"change what is not as on your cluster, then: {start}")
    return 0
