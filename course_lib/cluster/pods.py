"""A site's job as pods of Kubernetes: course_lib/templates/jobset.yaml with the site's choices put in."""

from pathlib import Path

from course_lib.cluster.site import Site, layout_of, replaced
from course_lib.validate import one_of

TEMPLATE = Path(__file__).parents[1] / "templates" / "jobset.yaml"
SLURM_ALONE = ("partition", "account", "gres", "module")
EFA = "vpc.amazonaws.com/efa"  # AWS's device plugin; https://docs.aws.amazon.com/eks/latest/userguide/node-efa.html
_FIELD = 22 * " "  # where the fields of `limits` begin


def jobset(site: Site, what: str = "train") -> str:
    """Return the JobSet of a site, with the rule who may connect: the trainer ("train"), or the check ("check").

    A pod is what a node is to Slurm: `site.nodes` pods with `site.gpus_per_node` GPUs each.

    Raises   ValueError for what only Slurm has, or another word
    """
    one_of("what", what, ("train", "check"))
    if told := [name for name in SLURM_ALONE if getattr(site, name)]:
        raise ValueError(f"{', '.join(told)}: Slurm's; pods are given container, claim, memory_gib, adapters")
    pods, ranks = site.nodes, site.gpus_per_node or 2
    limits = [f"memory: {site.memory_gib or 8 * ranks}Gi"]
    limits += [f"nvidia.com/gpu: {site.gpus_per_node}"] if site.gpus_per_node else []
    lock = ""
    if site.adapters:
        adapter, _, count = site.adapters.rpartition(":")
        limits += ["# Adapters of the network between nodes, as their device plugin names them.", f"{adapter}: {count}"]
        limits += ["# Pages of 2 MiB for libfabric's buffers.", "hugepages-2Mi: 5120Mi"] if adapter == EFA else []
        lock = (
            "                  # An adapter reads and writes memory that may not be moved: the container may lock it.\n"
            "                  securityContext: {capabilities: {add: [IPC_LOCK]}}\n"
        )
    job = "                    - course_lib.train\n"
    layout = f"                    - --layout={layout_of(site)}\n"
    changes = {
        "Kubernetes, 2 pods with 2 ranks each:": f"Kubernetes, {pods} pods with {ranks} ranks each:",
        "parallelism: 2\n": f"parallelism: {pods}\n",
        "completions: 2\n": f"completions: {pods}\n",
        "image: course-lib\n": f"image: {site.container}\n" if site.container else None,
        "                    - python\n": f"                    - {site.python}\n",
        "- --nnodes=2\n": f"- --nnodes={pods}\n",
        "- --nproc-per-node=2\n": f"- --nproc-per-node={ranks}\n",
        "                    - --layout=dp=2,tp=2,zero_stage=1\n": layout,
        "{name: NCCL_SOCKET_IFNAME, value: eth0}": f"{{name: NCCL_SOCKET_IFNAME, value: {site.interface or 'eth0'}}}",
        "{name: GLOO_SOCKET_IFNAME, value: eth0}": f"{{name: GLOO_SOCKET_IFNAME, value: {site.interface or 'eth0'}}}",
        "                  resources:\n": lock + "                  resources:\n",
        'cpu: "2"\n': f'cpu: "{(site.gpus_per_node or 0) * site.cpus_per_gpu or ranks}"\n',
        "memory: 8Gi\n": f"\n{_FIELD}".join(limits) + "\n",
        "claimName: course}": f"claimName: {site.claim}}}" if site.claim else None,
    }
    text = replaced(TEMPLATE, changes)
    if what == "train":
        return text
    start, end = text.index(job), text.index("                  env:\n")
    check = f"                    - course_lib.cluster\n{layout}                    - --folder=/shared\n"
    text = text[:start] + check + text[end:]
    text = text.replace("course-train", "course-check").replace("-f train.yaml", "-f check.yaml")
    text = text.replace("# The trainer of this course", "# The check before a long job")
    return text.replace("maxRestarts: 3", "maxRestarts: 0")
