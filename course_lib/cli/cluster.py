"""`course cluster init` and `course cluster check`: a site written down once, and looked at before a long job.

course cluster init site --partition gpu --gpus-per-node 8 --interface ib0 --module cuda/12.8
sbatch site/check.sbatch
course cluster init site --kind kubernetes --container registry/course --claim shared --nodes 4 --gpus-per-node 1
course cluster init site --kind shared --python /srv/course/bin/python
torchrun --nproc-per-node 4 -m course_lib.cluster --layout dp=2,tp=2
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes, Positional, UseAppendAction, subcommand

from course_lib.cluster.options import Check
from course_lib.cluster.pods import jobset
from course_lib.cluster.site import Site, batch_script, shared_file, write_site


@dataclass(frozen=True)
class Init:
    """Write site.toml and two jobs, train and check, into a folder: batch scripts, or a JobSet; or, as kind shared, a
    recipe of Apptainer and a module file, by which all who log in have one installation. Nothing is asked."""

    folder: Positional[Path] = Path()  # made if it is not there
    site: OmitArgPrefixes[UseAppendAction[Site]] = field(default_factory=Site)
    force: bool = False  # overwrite what is there
    kind: Literal["slurm", "kubernetes", "shared"] = "slurm"  # who starts jobs: sbatch, or kubectl with JobSet; or none


KINDS = {  # what writes each file, the files, and how one goes on
    "slurm": (batch_script, ("train.sbatch", "check.sbatch"), "sbatch check.sbatch"),
    "kubernetes": (jobset, ("train.yaml", "check.yaml"), "kubectl apply -f check.yaml"),
    "shared": (
        shared_file,
        ("apptainer.def", "modulefile"),
        "apptainer build course.sif apptainer.def, or module load",
    ),
}


def cluster(
    do: OmitSubcommandPrefixes[Annotated[Init, subcommand("init")] | Annotated[Check, subcommand("check")]],
) -> int:
    """Write down what your cluster is like, or look at its nodes, GPUs and links before a long job."""
    if isinstance(do, Check):
        from course_lib.cluster.__main__ import run_as_script

        run_as_script(do)
    job, names, start = KINDS[do.kind]
    for path in write_site(do.site, do.folder, do.force, job, names):
        print(path)
    print(f"change what is not as on your cluster, then: {start}")
    return 0
