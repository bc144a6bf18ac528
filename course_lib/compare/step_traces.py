"""One training step of every rank as Chrome traces, side by side."""

import time
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from course_lib.compare.five_d_profile import MOST_RANKS
from course_lib.config import ModelConfig
from course_lib.launch import launch
from course_lib.layout import Layout
from course_lib.measure.trace import RankTrace, calls_of, read_traces, trace_step
from course_lib.parallel import five_d
from course_lib.training import data
from course_lib.validate import Amount, Size, checked


@checked
def trace_ranks(
    config: ModelConfig,
    layout: Layout,
    folder: str | Path,
    seq_len: Size = 64,
    slow: Mapping[int, Amount] | None = None,
) -> list[RankTrace]:
    """Train on real ranks, record the fourth step of each in folder/rank0.json.gz and so on; return what they say.

    Two steps warm up, the third counts the collectives.
    slow   rank -> seconds that it sleeps in a forward pass, before its second block: to see how a slow rank looks

    Raises   ValueError if the layout has too many ranks for one machine, or the model cannot lie so
    """
    if layout.world_size > MOST_RANKS:
        raise ValueError(f"the layout has {layout.world_size} ranks, and one machine traces at most {MOST_RANKS}")
    layout.check_model(config, seq_len)
    launch(
        _trace_on_rank, layout.world_size, config, layout, str(Path(folder).resolve()), seq_len, slow or {}, quiet=True
    )
    return read_traces(folder)


def _trace_on_rank(config: ModelConfig, layout: Layout, folder: str, seq_len: int, slow: Mapping[int, float]) -> None:
    engine = five_d.build(config, layout)
    if sleep_s := slow.get(dist.get_rank()):
        blocks = [block for stage in engine.stages.values() for block in stage.blocks.values()]
        blocks[:2][-1].register_forward_pre_hook(lambda *call: time.sleep(sleep_s))
    optimizer = five_d.make_optimizer(engine)
    here, text_T = engine.groups.coordinates, data.tokens()
    batch = data.batch(text_T, 0, layout.sequences_per_step, seq_len, here["dp"], layout.dp)
    micro_batches = data.micro_batches(*batch, layout.micro_batches)

    def step() -> None:
        five_d.step(engine, micro_batches, optimizer, 1.0)

    for _ in range(2):
        step()
    calls = calls_of(step, engine.axes)
    dist.barrier()  # all begin together, so that the first collective does not wait for who is late
    trace_step(Path(folder) / f"rank{dist.get_rank()}.json.gz", step, calls)
