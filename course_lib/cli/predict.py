"""`course predict`: what runs of a table would show on a cluster.

course predict runs.csv --models models.json --gpu h100-80g --nodes-link efa --recipe nanotron --seq 4096 --out out.csv
"""

from pathlib import Path

from tyro.conf import Positional

from course_lib.hardware import Cluster
from course_lib.hardware import gpu as gpu_named
from course_lib.hardware import link as link_named
from course_lib.predict import predict_table
from course_lib.validate import whole


def predict(
    runs: Positional[Path],
    models: Path,
    out: Path,
    gpu: str = "h100-80g",
    nodes_link: str = "efa",
    recipe: str = "nanotron",
    seq: int = 4096,
) -> int:
    """Predict peak memory, tokens/s and MFU of each run of a table, and write the table with them added.

    Args:
        runs: CSV with the columns model, nodes, gpus, mbs, grad_acc, dp, pp, tp, zero
        models: JSON with the shapes of its models
        out: the CSV that is written
        gpu: a GPU, such as h100-80g
        nodes_link: the network between nodes, such as efa
        recipe: the framework whose runs these are: nanotron
        seq: tokens of a sequence
    """
    whole("seq", seq)
    device = gpu_named(gpu)
    cluster = Cluster(device, link_named(device.link), link_named(nodes_link))
    for path in (runs, models):
        if not path.is_file():
            raise ValueError(f"there is no file {path}; give one")
    rows = predict_table(runs, models, cluster, seq, recipe, out)
    fitting = sum(row["fits"] == "yes" for row in rows)
    print(f"{len(rows):,} runs, {fitting:,} predicted to fit; modelled with rates fitted to measured runs: {out}")
    return 0
