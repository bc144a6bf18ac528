"""The labs. Each compares layouts of one model on the same ranks, and the first ways to sum a tensor over ranks.

On the CPU a toy stands for the model, and a small tensor for the large one.
"""

from dataclasses import dataclass, replace

from course_lib.config import ModelConfig, MoeConfig, preset
from course_lib.layout import Layout
from course_lib.validate import Size, check_fields, checked

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
class Lab:
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
    questions: tuple[str, ...]
    experts: bool = False
    ranks: tuple[int, ...] = CLUSTER
    minutes: Size = 10

    def __post_init__(self) -> None:
        check_fields(self)

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


_LABS = (
    Lab(
        "00", "Three ways to sum a tensor over all ranks", "00_ranks_and_collectives", (),
        "Through rank 0 all bytes pass one rank. In a ring each rank sends at most twice the tensor.",
        ("How many times slower is the way through rank 0?", "Why is the backend faster than the ring by hand?"),
    ),
    Lab(
        "01", "Memory of one GPU: constant and per sequence", "01_single_gpu_memory",
        ("dp=1", "dp=1,micro_batch=2"),
        "Parameters, gradients and optimizer states take the same in both runs. Activations take twice as much.",
        (
            "Compute both parts from the two peaks. How many bytes per parameter is the constant part?",
            "How many TFLOP/s does the GPU reach, and what is the MFU?",
        ),
        ranks=ONE_GPU,
    ),
    Lab(
        "02", "The same batch with less memory", "02b_activations",
        ("dp=1,micro_batch=2", "dp=1,micro_batches=2", "dp=1,micro_batch=2,recompute=full"),
        "Two micro-batches in place of one, or recomputation: both lower the peak, at different costs.",
        ("Which of the two saves more, and what does each cost in seconds?", "When would you need both?"),
        ranks=ONE_GPU,
    ),
    Lab(
        "03", "Data parallelism with and without accumulation", "03_data_parallel",
        ("dp={n}", "dp={n},micro_batches=8"),
        "Gradients are summed once per step. With more micro-batches per step the same bytes serve more tokens.",
        ("By which factor do tokens per second rise with 8 micro-batches?", "Which bytes stay the same, and why?"),
    ),
    Lab(
        "04", "Memory of ZeRO 0, 1 and 3", "04_zero",
        ("dp={n}", "dp={n},zero_stage=1", "dp={n},zero_stage=3"),
        "The peak falls from stage to stage. Stage 3 sends half as many bytes again.",
        ("How many GB does each stage save, and how many did you expect?", "What does stage 3 cost in seconds?"),
    ),
    Lab(
        "05", "Tensor parallelism inside a node and across nodes", "05_tensor_parallel",
        ("dp={n}", "dp=2,tp={half}", "tp={n},micro_batches=2"),
        "With two nodes the ranks of tp={half} share a node, and those of tp={n} do not.",
        ("How much slower is the layout whose sums cross the network?", "Which of its sums could hide?"),
    ),
    Lab(
        "06", "Memory of sequence parallelism", "06_sequence_parallel",
        ("dp=2,tp={half}", "dp=2,tp={half},sequence_parallel=true"),
        "Norms and the residual stream are cut along the sequence: the peak falls, and the bytes sent stay the same.",
        ("How many GB does the peak fall?", "Why are the bytes sent the same, although there are twice as many calls?"),
    ),
    Lab(
        "07", "Three ways of context parallelism", "07_context_parallel",
        ("cp={n}", "cp={n},cp_method=all_gather", "cp={n},cp_method=ulysses"),
        "All three compute the same. A ring hides its steps only where a rank has enough tokens.",
        ("Which way is fastest here, and which has the lowest peak?", "From how many tokens on would the ring hide?"),
    ),
    Lab(
        "08", "The bubble of a pipeline", "08_pipeline_parallel",
        ("pp={n},micro_batches={n}", "pp={n},micro_batches={many}"),
        "The bubble is (pp - 1) / micro_batches of the time without it.",
        ("Which share of the step was the bubble in each run?", "Why does the peak hardly rise with 1F1B?"),
    ),
    Lab(
        "09", "Experts on every rank or spread over ranks", "09b_expert_parallel",
        ("dp={n}", "dp={n},ep={n}"),
        "Spread experts need less memory and fewer summed gradients, and two all-to-alls per layer and direction.",
        ("What do the all-to-alls cost, and what do they save?", "What happens if one expert gets most tokens?"),
        experts=True,
    ),
    Lab(
        "10", "Several axes at once", "10_five_d",
        ("dp=2,tp={half},sequence_parallel=true", "tp={half},pp=2,micro_batches=8", "dp={half},pp=2,micro_batches=8"),
        "The network joins two nodes: along dp, along pp, or along pp with more data parallelism inside.",
        ("Which layout is fastest, and was it predicted to be?", "Which axis sends most bytes over the network?"),
    ),
    Lab(
        "11", "Is the order of a planner the measured order?", "11_finding_a_configuration",
        (
            "dp={n},zero_stage=1,micro_batches=4",
            "dp={half},tp=2,zero_stage=1,micro_batches=8",
            "dp={half},pp=2,zero_stage=1,micro_batches=8",
        ),
        "Three layouts with the same global batch. The model ranks them before anything runs.",
        (
            "Is the measured order the modelled one?",
            "Which modelled rate would you correct first? Predict again with `course calibrate`.",
        ),
    ),
    Lab(
        "12", "Which axis may cross the network", "12_on_a_cluster",
        tuple("tp={half},pp=2,micro_batches=4,micro_batch=8" + order for order in ("", ",order=tp-dp-cp-pp")),
        "The same two axes twice: first pp joins the nodes, then tp. The bytes are the same, and cross another link. "
        "Micro-batches of 8 sequences keep a GPU computing; with short ones it waits for launches in both.",
        (
            "Hand in what check.sbatch printed. Which link is slowest?",
            "How much slower is the second layout, and which link does it wait for?",
            "Submit site/train.sbatch and kill one rank. From which step does the run go on, and what was lost?",
        ),
    ),
)  # fmt: skip
LABS = {lab.chapter: lab for lab in _LABS}


@checked
def lab_named(chapter: str) -> Lab:
    """Return the lab of a chapter: "05", or 5 as text.

    Raises   ValueError for a chapter without a lab
    """
    if not chapter or chapter.zfill(2) not in LABS:
        raise ValueError(f"chapter is {chapter!r}; labs are for {', '.join(LABS)}")
    return LABS[chapter.zfill(2)]
