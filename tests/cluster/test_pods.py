"""A site's pods: what is chosen stands in them, each line is explained, and two pods' commands train together."""

import os
import re
import shlex
import subprocess
import sys

import pytest
import yaml
from harness import free_port

from course_lib.cli import commands
from course_lib.cluster import Site, jobset, read_site
from course_lib.cluster.pods import TEMPLATE
from course_lib.layout import Layout

FOUR = Site(nodes=4, gpus_per_node=1, container="registry/course:1", claim="data", adapters="vpc.amazonaws.com/efa:1")


def pod_of(text: str) -> tuple[dict, dict]:
    (job,) = list(yaml.safe_load_all(text))[1]["spec"]["replicatedJobs"]
    return job["template"]["spec"], job["template"]["spec"]["template"]["spec"]


def test_the_command_writes_what_it_was_told_and_refuses_what_is_slurms(tmp_path, capsys):
    words = "--kind kubernetes --nodes 4 --gpus-per-node 1 --container registry/course:1 --claim data"
    words = shlex.split(f"{words} --adapters vpc.amazonaws.com/efa:1")
    assert commands.main(["cluster", "init", str(tmp_path), *words]) == 0
    assert read_site(tmp_path / "site.toml") == FOUR
    assert (tmp_path / "train.yaml").read_text() == jobset(FOUR)
    assert "kubectl apply -f check.yaml" in capsys.readouterr().out
    assert commands.main(["cluster", "init", str(tmp_path / "b"), "--kind", "kubernetes", "--partition", "gpu"]) == 2
    assert "partition: Slurm's; pods are given container, claim" in capsys.readouterr().err
    assert commands.main(["cluster", "init", str(tmp_path / "b"), "--adapters", "efa"]) == 2
    assert "give the resource and how many" in capsys.readouterr().err


def test_pods_have_the_choices_of_the_site():
    assert jobset(Site()) == TEMPLATE.read_text().replace("memory: 8Gi", "memory: 16Gi")
    job, pod = pod_of(jobset(FOUR))
    (container,) = pod["containers"]
    assert job["parallelism"] == job["completions"] == 4 and container["image"] == "registry/course:1"
    limits = {"memory": "8Gi", "nvidia.com/gpu": 1, "vpc.amazonaws.com/efa": 1, "hugepages-2Mi": "5120Mi", "cpu": "8"}
    assert container["resources"]["limits"] == limits
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    layout = Layout.parse(next(word for word in container["command"] if "--layout" in word).partition("=")[2])
    assert layout.world_size == 4
    assert {"--nnodes=4", "--nproc-per-node=1"} <= set(container["command"])
    _, pod = pod_of(jobset(Site(nodes=1, gpus_per_node=4, adapters="rdma/hca:2")))
    assert pod["containers"][0]["resources"]["limits"]["rdma/hca"] == 2
    command = pod_of(jobset(FOUR, "check"))[1]["containers"][0]["command"]
    assert command[-3:] == ["course_lib.cluster", "--layout=dp=4,tp=1,zero_stage=1", "--folder=/shared"]


@pytest.mark.parametrize("what", ["train", "check"])
def test_each_line_that_chooses_is_explained(what):
    lines = [line.strip() for line in jobset(FOUR, what).splitlines()]
    for number, line in enumerate(lines):
        structure = not line or line[0] == "#" or line[-1] == ":" or re.match(r"(---|apiVersion|kind|- name|- )", line)
        if not structure:
            assert any(above.startswith("#") for above in lines[number - 4 : number]), f"no comment above: {line}"


def test_kubernetes_and_jobset_know_every_field():
    from kubeflow_trainer_api import models

    for site in (Site(), FOUR):
        said = list(yaml.safe_load_all(jobset(site)))[1]
        assert models.JobsetV1alpha2JobSet.from_dict(said).to_dict() == said, "it leaves out what it does not know"


@pytest.mark.programs
def test_the_commands_of_two_pods_train_together_here(tmp_path):
    command = pod_of(jobset(Site(nodes=2)))[1]["containers"][0]["command"]
    here = {"$(JOB_COMPLETION_INDEX)": "{rank}", "course-train-node-0-0.course-train": "127.0.0.1"}
    here |= {"/shared": str(tmp_path), "29500": free_port()}
    runs = []
    for rank in range(2):
        words = [sys.executable, *command[1:]]
        for old, new in here.items():
            words = [word.replace(old, new.format(rank=rank)) for word in words]
        out = (tmp_path / f"pod{rank}").open("w")
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        runs.append(subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=environment))
    codes = [run.wait(240) for run in runs]
    told = (tmp_path / "pod0").read_text()
    assert codes == [0, 0], told
    assert re.search(r"step 20 of 20: loss 3\.\d+", told), told
    assert list((tmp_path / "checkpoints" / "course-train").iterdir())
