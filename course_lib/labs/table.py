"""The labs: each compares layouts of one model on the same ranks, and the first ways to sum a tensor over ranks.

On the CPU a toy stands for the model, and a small tensor for the large one.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from course_lib.config import ModelConfig, MoeConfig, preset
from course_lib.layout import Layout
from course_lib.validate import Checked, Share, Size, checked, read_toml

# Small enough for one GPU of 40 GB without any cut, and all of 8 ranks divide it: heads, layers, experts.
DENSE = ModelConfig("1.1B", 16, 2048, 32, 8, d_ff=8192, vocab_size=32_768, max_seq_len=4096)
EXPERTS = replace(
    DENSE,
    name="1.0B, 8 experts",
    num_layers=8,
    moe=MoeConfig(num_experts=8, top_k=2, d_expert=2048, balancing="aux_loss"),
)
SEQ_LEN, SEQ_LEN_ON_CPU = 4096, 64
SUMMED_BYTES, SUMMED_BYTES_ON_CPU = 256 * 10**6, 10**6
ONE_GPU, CLUSTER = (1,), (4, 8)


@dataclass(frozen=True)
class Question(Checked):
    """What is asked after a run, and for who marks it the answer.

    compute     the answer's numbers by name, as lines of Python in the words of answers.py
    within      by which share a number may differ from the answer's
    answer      with the numbers in braces; `half` and `none` say what else gets half marks, and what gets none
    """

    asks: str
    compute: str
    within: Share
    answer: str
    half: str
    none: str


@dataclass(frozen=True)
class Lab(Checked):
    """A lab of a chapter.

    layouts     as texts, in which {n} is the number of ranks, {half} a half of it and {many} four times it; none where
                ways to sum are compared
    questions   what to hand in beside the file
    ranks       numbers of ranks that it can be started with
    """

    chapter: str
    title: str
    notebook: str
    layouts: tuple[str, ...]
    aim: str
    questions: tuple[Question, ...]
    experts: bool = False
    ranks: tuple[int, ...] = CLUSTER
    minutes: Size = 10

    def check_ranks(self, num_ranks: int) -> None:
        """Raise ValueError for a number of ranks that the lab cannot be started with."""
        if num_ranks not in self.ranks:
            raise ValueError(
                f"lab {self.chapter} has {num_ranks} ranks; start it with {' or '.join(map(str, self.ranks))}"
            )

    def layouts_on(self, num_ranks: int) -> list[Layout]:
        """Return the layouts for so many ranks, a number that `check_ranks` takes."""
        self.check_ranks(num_ranks)
        return [
            Layout.parse(text.format(n=num_ranks, half=num_ranks // 2, many=4 * num_ranks)) for text in self.layouts
        ]

    def model(self, on_gpu: bool) -> tuple[ModelConfig, int]:
        """Return the model and the tokens of a sequence."""
        if on_gpu:
            return (EXPERTS if self.experts else DENSE), SEQ_LEN
        return preset("toy-moe" if self.experts else "toy"), SEQ_LEN_ON_CPU


LABS = {
    chapter: Lab(chapter, **fields | {"questions": tuple(Question(**asked) for asked in fields["questions"])})
    for chapter, fields in read_toml(Path(__file__).with_name("labs.toml")).items()
}


@checked
def lab_named(chapter: str) -> Lab:
    """Return the lab of a chapter: "05", or 5 as text.

    Raises   ValueError for a chapter without a lab
    """
    if not chapter or chapter.zfill(2) not in LABS:
        raise ValueError(f"chapter is {chapter!r}; labs are for {', '.join(LABS)}")
    return LABS[chapter.zfill(2)]
