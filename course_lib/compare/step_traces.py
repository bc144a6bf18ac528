"""One training step of every rank as Chrome traces, side by side: the trainer's own, of a short run."""

import time
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook

from course_lib.compare.five_d_profile import MOST_RANKS
from course_lib.config import ModelConfig
from course_lib.launch import launch
from course_lib.layout import Layout
from course_lib.measure.trace import RankTrace, read_traces
from course_lib.model import gpt, llama
from course_lib.train import Logs, TrainPlan, trainer
from course_lib.validate import Amount, Size, checked

_RECORDED = 3  # two steps warm up, the third counts the collectives


@checked
def trace_ranks(
    config: ModelConfig,
    layout: Layout,
    folder: str | Path,
    seq_len: Size = 64,
    slow: Mapping[int, Amount] | None = None,
) -> list[RankTrace]:
    """Train on real ranks, record the fourth step of each in folder/trace, and return what they say.

    slow   rank -> seconds that it sleeps in a forward pass, before its second block: to see how a slow rank looks

    Raises   ValueError if the layout has too many ranks for one machine, or the model cannot lie so
    """
    if layout.world_size > MOST_RANKS:
        raise ValueError(f"the layout has {layout.world_size} ranks, and one machine traces at most {MOST_RANKS}")
    layout.check_model(config, seq_len)
    logs = Logs(str(Path(folder).resolve()), trace=_RECORDED)
    arguments = config, layout, TrainPlan(steps=_RECORDED + 1, seq_len=seq_len), None, logs
    launch(_train_slowly, layout.world_size, slow or {}, *arguments, quiet=True)
    return read_traces(Path(folder) / "trace")


def _train_slowly(slow: Mapping[int, float], *arguments: object) -> None:
    blocks: list = []  # in the order of their first forward

    def sleep_before_second_block(module, args: tuple) -> None:
        if isinstance(module, llama.Block | gpt.Block):
            if module not in blocks:
                blocks.append(module)
            if module is blocks[:2][-1]:
                time.sleep(slow[dist.get_rank()])

    if dist.get_rank() in slow:
        register_module_forward_pre_hook(sleep_before_second_block)
    trainer.train(*arguments)
