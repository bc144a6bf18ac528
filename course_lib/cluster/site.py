"""What a site is like, in one file: from it come batch scripts or pods, and the allocations that a notebook asks for.

`site.toml` holds names and numbers alone. The scripts are course_lib/templates/train.sbatch with the site's choices
put in, and pods course_lib/templates/jobset.yaml (pods.py). One installation for all is apptainer.def or modulefile.
"""

import json
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from course_lib.validate import Count, Size, check_fields, checked, writable

TEMPLATE = Path(__file__).parents[1] / "templates" / "train.sbatch"
WORD = re.compile(r"[\w.,:=@%+^/~-]+")  # nothing that bash, sbatch or TOML reads as more than a name
TITLE = "# The trainer of this course on 2 nodes with 2 ranks each:   sbatch train.sbatch\n"  # of the template
CHECK = """    -m course_lib.cluster --layout "$LAYOUT" --folder "$SLURM_SUBMIT_DIR"\n"""


@dataclass(frozen=True)
class Site:
    """A cluster as its users see it; None: the cluster's own default, or nothing of the kind."""

    partition: str | None = None  # the queue, as the cluster names it
    account: str | None = None  # who pays, as the cluster names it
    nodes: Size = 2  # of a job
    gpus_per_node: Count | None = None  # asked for as --gpus-per-node; 0: ranks compute on the CPU
    gres: str | None = None  # the same as --gres, where a cluster wants that: gpu:h100:8
    interface: str | None = None  # the network interface of NCCL and gloo, as `ip addr` names it: ib0
    hca: str | None = None  # InfiniBand or RoCE adapters, as `ibv_devices` names them: mlx5
    module: tuple[str, ...] = ()  # loaded first, in this order: cuda/12.8
    container: str | None = None  # an image, for --container-image of Pyxis or for pods
    python: str = "python"  # the Python with the course; every node sees it under this path
    cpus_per_gpu: Size = 8  # cores for the rank of a GPU and its data loading; without GPUs ranks have one each
    claim: str | None = None  # pods: the PersistentVolumeClaim that all of them write
    memory_gib: Size | None = None  # pods: host memory of each, with its /dev/shm
    adapters: str | None = None  # pods: what each asks for besides GPUs: vpc.amazonaws.com/efa:4

    def __post_init__(self) -> None:
        object.__setattr__(self, "module", tuple(self.module) if isinstance(self.module, list) else self.module)
        check_fields(self)
        for name, value in vars(self).items():
            for word in value if name == "module" else [value]:
                if isinstance(word, str) and not WORD.fullmatch(word):
                    raise ValueError(
                        f"{name} is {word!r}; give a name of letters, digits and .,:=@%+^/~- as the cluster prints it"
                    )
        if self.gres is not None and self.gpus_per_node is not None:
            raise ValueError(
                f"gres is {self.gres!r} and gpus_per_node {self.gpus_per_node}; both ask for GPUs: give one of them"
            )
        if self.gres is not None and not re.fullmatch(r"gpu(:[\w.-]+)?:\d+", self.gres):
            raise ValueError(f"gres is {self.gres!r}; give GPUs as gpu:8 or gpu:h100:8")
        if self.adapters is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+:[1-9]\d*", self.adapters):
            raise ValueError(f"adapters is {self.adapters!r}; give the resource and how many: vpc.amazonaws.com/efa:4")

    @property
    def num_gpus(self) -> int | None:
        """GPUs of a node, however they are asked for."""
        return int(self.gres.rpartition(":")[2]) if self.gres else self.gpus_per_node

    def slurm(self, ntasks_per_node: int | None = None, **more):
        """Return the allocation for `launch(..., where=site.slurm())`: a rank for each GPU, or two a node.

        Modules and containers are for batch scripts: ranks of a notebook run in the notebook's own Python.
        """
        from course_lib.launch import Slurm  # needs torch

        per_node = ntasks_per_node or self.num_gpus or 2
        return Slurm(self.nodes, per_node, self.partition, self.num_gpus, account=self.account, **more)

    def to_toml(self) -> str:
        """Return the text of site.toml: a line for each field that is not left out."""
        lines = ["# What `course cluster init` was told; the scripts beside it were written from this."]
        lines += [f"{name} = {json.dumps(value)}" for name, value in vars(self).items() if value not in (None, ())]
        return "\n".join(lines) + "\n"


@checked
def read_site(path: Path) -> Site:
    """Return the site of a file that `course cluster init` wrote, or that was written by hand.

    Raises   ValueError if there is no such file, it is no TOML, or has a name that a site has not
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}; write one with: course cluster init {path.parent}")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no TOML ({error}); write one with: course cluster init") from None
    known = [field.name for field in fields(Site)]
    if unknown := sorted(set(values) - set(known)):
        raise ValueError(f"{path} has {', '.join(unknown)}; a site has only {', '.join(known)}")
    return Site(**values)


@checked
def batch_script(site: Site, what: str = "train") -> str:
    """Return the batch script of a site: the trainer ("train"), or the check before a long job ("check").

    Raises   ValueError for another word
    """
    if what not in ("train", "check"):
        raise ValueError(f"what is {what!r}; choose train or check")
    text = TEMPLATE.read_text(encoding="utf-8")
    gpus = f"gres={site.gres}" if site.gres else f"gpus-per-node={site.gpus_per_node}"
    options = []
    if site.container:
        options = [f"--container-image={site.container}", '--container-mounts="$SLURM_SUBMIT_DIR:$SLURM_SUBMIT_DIR"']
    nodes, ranks = site.nodes, site.num_gpus or 2
    changes = {
        "#SBATCH --nodes=2\n": f"#SBATCH --nodes={nodes}\n",
        TITLE: f"# The trainer of this course on {nodes} nodes with {ranks} ranks each:   sbatch train.sbatch\n",
        "#SBATCH --cpus-per-task=2\n": f"#SBATCH --cpus-per-task={(site.num_gpus or 0) * site.cpus_per_gpu or 2}\n",
        "##SBATCH --gpus-per-node=2\n": f"#SBATCH --{gpus}\n" if site.num_gpus else None,
        "##SBATCH --partition=gpu\n": f"#SBATCH --partition={site.partition}\n" if site.partition else None,
        "##SBATCH --account=my-project\n": f"#SBATCH --account={site.account}\n" if site.account else None,
        "#module load cuda\n": f"module load {' '.join(site.module)}\n" if site.module else None,
        "PYTHON=${PYTHON:-python}\n": f"PYTHON=${{PYTHON:-{site.python}}}\n",
        "#export NCCL_SOCKET_IFNAME=ib0\n": f"export NCCL_SOCKET_IFNAME={site.interface}\n" if site.interface else None,
        "#export NCCL_IB_HCA=mlx5\n": f"export NCCL_IB_HCA={site.hca}\n" if site.hca else None,
        "#export GLOO_SOCKET_IFNAME=ib0\n": f"export GLOO_SOCKET_IFNAME={site.interface}\n" if site.interface else None,
        "SRUN_OPTIONS=()\n": f"SRUN_OPTIONS=({' '.join(options)})\n",
        "LAYOUT=${LAYOUT:-dp=2,tp=2,zero_stage=1}\n": f"LAYOUT=${{LAYOUT:-{layout_of(site)}}}\n",
    }
    if what == "check":
        changes |= {
            "#SBATCH --job-name=course-train\n": "#SBATCH --job-name=course-check\n",
            "#SBATCH --requeue\n": "#SBATCH --no-requeue\n",
            "    --max-restarts=3 \\\n": "    --max-restarts=0 \\\n",
            TITLE: "# The check before a long job, on its nodes:   sbatch check.sbatch\n",
            next(line for line in text.splitlines(keepends=True) if line.startswith("    -m course_lib.train")): CHECK,
        }
    return replaced(TEMPLATE, changes)


def replaced(template: Path, changes: dict[str, str | None]) -> str:
    """The template with each old text, which it must have once, as the new one; None leaves it.

    Raises   ValueError if the template has one of them never, or more than once
    """
    text = template.read_text(encoding="utf-8")
    for old, new in changes.items():
        if text.count(old) != 1:
            raise ValueError(
                f"{template.name} has {text.count(old)} lines {old.strip()!r}; required: one, to be replaced"
            )
        text = text.replace(old, new or old)
    return text


def layout_of(site: Site) -> str:
    """All ranks of a node along tp, up to 8, and nodes along dp."""
    ranks = site.num_gpus or 2
    tp = max(size for size in (1, 2, 4, 8) if ranks % size == 0)
    return f"dp={site.nodes * ranks // tp},tp={tp},zero_stage=1"


def shared_file(site: Site, what: str) -> str:
    """Return a file by which all who log in have one installation: Apptainer's recipe, or a module of `site.python`.

    Raises   ValueError if the module's Python is no full path
    """
    text = (TEMPLATE.parent / f"{what}{'.def' if what == 'apptainer' else ''}").read_text(encoding="utf-8")
    if site.python == Site().python or what == "apptainer":
        return text
    if not site.python.startswith("/") or not site.python.endswith("/bin/python"):
        raise ValueError(f"python is {site.python!r}; give that of an installation for all, as /srv/course/bin/python")
    return text.replace("/srv/course", site.python.removesuffix("/bin/python"))


@checked
def write_site(
    site: Site,
    folder: Path,
    force: bool = False,
    job: Callable = batch_script,
    names: Sequence[str] = ("train.sbatch", "check.sbatch"),
) -> list[Path]:
    """Write site.toml and the files `names` into a folder; `job` returns the text of each by its name's first word.

    Raises   ValueError if one of them is there and is not to be overwritten, or nothing can be written there
    """
    texts = {"site.toml": site.to_toml()}
    texts |= {name: job(site, name.partition(".")[0]) for name in names}
    if not force and (there := [name for name in texts if (folder / name).exists()]):
        raise ValueError(f"{folder} already has {', '.join(there)}; give another folder, or --force to overwrite")
    writable("folder", folder)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]
