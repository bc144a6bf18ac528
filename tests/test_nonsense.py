"""Nonsense is refused where it enters: every public function and record, one wrong argument at a time.

A call that works is changed in one argument: another type, an unknown word, nan, infinity, a number that is negative,
zero or absurdly large. What comes back must be a ValueError or TypeError in one sentence, raised by the package, at
once. What may be zero, or any text, is accepted.
"""

import inspect
import linecache
import math
import pkgutil
import re
import signal
import traceback
from functools import partial
from importlib import import_module

import matplotlib.pyplot as plt
import pytest
import torch

import course_lib
from course_lib import traffic
from course_lib.claims import ledger
from course_lib.cluster import Site
from course_lib.compare.profile import KindComparison
from course_lib.config import preset
from course_lib.hardware import Cluster, gpu, link
from course_lib.labs import Nodes, lab_named
from course_lib.layout import Layout, Mesh
from course_lib.layout.experts import ExpertLayout
from course_lib.measure.trace import RankTrace
from course_lib.memory.budget import budget, budgets
from course_lib.memory.states import LoRA, StateBytes
from course_lib.memory.zero import Offload, offload_link_bytes
from course_lib.model import build, moe_layers
from course_lib.plan import Job, work_out
from course_lib.run import Run
from course_lib.schedules import make, simulate
from course_lib.span import Span
from course_lib.timing.failures import Failures
from course_lib.traffic.synthetic_routing import synthetic_routing
from course_lib.validate import checked

LIMIT_S = 2.0  # of CPU time, refused or done; usually milliseconds
HUGE = 10**15
FREE = re.compile(
    r"place|name|published_name|model_name|title|text|label|what|where|caption|unit|source|note|folder|path|\w*_ip|why|kind|[xy]label|field|nvme_path|"
    r"deepspeed_json|latency_source|device_name"
)
NEVER_ZERO = re.compile(
    r"dp|cp|tp|pp|v|d_\w+|num_(?!shared|tokens)\w+|\w+_size|\w*seq_len|top_k|micro_batch(?:es)?|itemsize|ranks_per_node|every|keep"
)

SCHEDULE = make("1f1b", 2, 4)
MIXTURE = preset("toy-moe")
RUN = Run(preset("toy"), Layout.parse("dp=2,pp=2,micro_batches=2"), seq_len=16)
MIXTURE_RUN = Run(MIXTURE, Layout.parse("dp=2,ep=2"), seq_len=16)
JOB = Job(preset("toy"), Cluster(gpu("h100"), link("nvlink4"), link("efa")), 2, 64, 128)
EXPERTS = ExpertLayout(num_experts=8, ep_size=2)
ROUTES = synthetic_routing(EXPERTS, tokens_per_rank=4, top_k=2)
ROWS = [[1, 2], [3, 4]]
CALLS = traffic.step.calls(RUN)["data"]
CURVE = {1.0: 2.0, 2.0: 3.0}
LINK_BYTES = offload_link_bytes(StateBytes(8, 8, 16), Offload("host"))
RANKS = [[1.0, 2.0], [3.0, 4.0]]
CLAIM = ledger()[0]


def routed():
    """A layer of experts that has routed some tokens."""
    model = build(MIXTURE)
    model(torch.zeros(1, 8, dtype=torch.long))
    return moe_layers(model)[0]


RANK_TRACE = RankTrace(0, (Span(0, "compute", "gemm", 0.0, 1.0), Span(0, "tp", "all_reduce", 1.0, 2.0)), 3.0, "cpu")
LAB_RUN = {
    "lab": lab_named("05"),
    "machine": Nodes(),
    "layout": Layout.parse("dp=2,tp=4"),
    "measured": {
        "lab": "05",
        "device": "cpu",
        "ranks": 4,
        "nodes": 1,
        "runs": [{"run": "dp=4", "step_s": 0.1, "tokens_per_s_per_gpu": 9.0, "peak_bytes": None, "sent_bytes": 8.0}],
    },
}
LINEAR = torch.nn.Linear(2, 2)
PARAMETERS = {"parameters": [LINEAR.weight]}
WITH_GRADIENT = {"parameters": [torch.nn.Parameter(torch.ones(2))]}
WITH_GRADIENT["parameters"][0].grad = torch.ones(2)
HEADS = {name: torch.zeros(1, 2, 4, 8) for name in ("q_BNSH", "k_BKSH", "v_BKSH")}


def in_floats(record) -> dict:
    """The fields of a record, whole numbers as floats where both are the same."""
    return {name: float(value) if isinstance(value, int) else value for name, value in vars(record).items()}


# What a parameter of that name is in a call that works.
VALUES = {
    "cluster": Cluster(gpu("h100"), link("nvlink4"), link("efa")),
    "failures": Failures(100.0, 10.0, 10.0),
    "mtbf_of_gpu_s": 1e6,
    "forward_s": 1.0,
    "backward_s": 2.0,
    "comm_s": 1.0,
    "grad_bytes": 8.0,
    "compute_s": 3.0,
    "bytes_per_s": 1e9,
    "flops_per_s": 1e12,
    "flops": 1e12,
    "hardware_flops": 1e12,
    "model_flops": 1e12,
    "flops_a_token": 1e9,
    "moved_bytes": 1e9,
    "peak_flops_per_s": 1e12,
    "seconds": 1.0,
    "num_gpus": 8,
    "utilisation": 0.5,
    "tokens_per_gpu": 1e3,
    "num_tokens": 64,
    "global_batch_size": 8,
    "spans": [Span(0, "compute", "forward", 0.0, 1.0)],
    "recipe": "fp32",
    "optimizer": "adamw",
    "lora": LoRA(4),
    "states": StateBytes(8, 8, 16),
    "offload": Offload(),
    "batch_size": 4,
    "config": preset("toy"),
    "count": 2,
    "cp_size": 2,
    "d_expert": 64,
    "d_ff": 64,
    "d_model": 64,
    "dp_size": 2,
    "flats": [],
    "folder": "runs",
    "gpu": gpu("h100"),
    "index": 0,
    "itemsize": 4,
    "key": "h100",
    "key_rank": 1,
    "layout": Layout(dp=2),
    "link": link("efa"),
    "max_seq_len": 64,
    "mesh": Mesh(dp=2),
    "micro_batch_size": 1,
    "model": build(preset("toy")),
    "name": "1f1b",
    "num_experts": 8,
    "num_heads": 4,
    "num_kv_heads": 4,
    "num_layers": 2,
    "num_micro_batches": 4,
    "num_processes": 8,
    "sequence_sharding": "zigzag",
    "payload_bytes": 64,
    "pp": 2,
    "query_rank": 0,
    "ranks_per_node": 2,
    "run": RUN,
    "schedule": SCHEDULE,
    "seq_len": 64,
    "shard_len": 8,
    "simulation": simulate(SCHEDULE),
    "stage": 0,
    "table": [[1, 2], [3, 4]],
    "text": "F0 B0",
    "title": "a picture",
    "xlabel": "x",
    "ylabel": "y",
    "tokens_T": torch.zeros(500, dtype=torch.long),
    "top_k": 2,
    "tp_size": 2,
    "v": 1,
    "vocab_size": 256,
    "world_size": 4,
    "x_BS": torch.zeros(4, 8, dtype=torch.long),
    "y_BS": torch.zeros(4, 8, dtype=torch.long),
}

# The modules, and of each function or record what the table above does not say; a text says why one is left out.
MODULES: dict[str, dict[str, dict | str]] = {
    "config": {
        "ModelConfig": {"name": "tiny"},
        "MlaConfig": {"q_rank": 8, "kv_rank": 8, "nope_dim": 8, "rope_dim": 8, "value_dim": 8},
        "RopeScaling": {"factor": 8.0},
        "preset": {"name": "toy"},
    },
    "schedules.builders": {"check_interleaved": {"v": 2}},
    "schedules.instructions": {
        "Schedule": {"rank_of_stage": (0, 1), "instructions": SCHEDULE.instructions},
        "from_lists": {"rows": [["F0", "B0"]]},
    },
    "schedules.bubbles": {},
    "schedules.simulator": {},
    "schedules.check": {"chart_problems": {"chart": "F0 B0"}},
    "layout.mesh": {},
    "layout.sequence_sharding": {},
    "layout.block_pairs": {},
    "layout.partition": {
        "piece_sizes": {"size": 5, "parts": 2},
        "check_heads": {"tp": 2},
        "even_layers": {"num_stages": 2},
        "fewer_at_the_ends": {"num_layers": 6, "num_stages": 2},
        "check_layers": {"layers": [2, 2]},
        "check_method": {"method": "ring"},
    },
    "layout.experts": {"capacity_of": {"num_tokens": 8, "capacity_factor": 1.0}},
    "layout.record": {},
    "traffic.synthetic_routing": {"synthetic_routing": {"layout": EXPERTS, "tokens_per_rank": 4}},
    "traffic.collectives": {
        "Call": {"place": "gradients", "collective": "all_reduce", "group_size": 2},
        **{name: {"calls": CALLS} for name in ("sent_bytes", "by_collective", "call_counts")},
    },
    "traffic.context": {},
    "traffic.data": {"held": {"kind": "matrices"}},
    "traffic.experts": {
        "expected_calls": {"run": MIXTURE_RUN},
        "expected_places": {"places": 2},
        "expected_crossings": {"layout": EXPERTS},
    },
    "traffic.routing": {
        "counts_of": {"experts": ROUTES},
        "plain_rows": {"counts": ROWS, "layout": EXPERTS},
        "sent": {"rows": ROWS, "layout": EXPERTS, "row_bytes": 8},
        "moe_traffic": {"experts": ROUTES, "layout": EXPERTS},
    },
    "traffic.step": {},
    "cluster.judge": {"compare_seconds": {"seconds": CURVE}, "judge": "reads what ranks have measured"},
    "cluster.site": {
        "Site": {"python": ...},  # a site's own word
        "read_site": "reads a file",
        "batch_script": {"site": Site(), "what": "train"},
        "write_site": "writes files",
    },
    "cluster.measure": {
        "Probe": {},
        "probe_for": {"device": torch.device("cpu"), "folder": None, "message_mb": None},
        "pairs_of": {},
        "phases_of": {"pairs": [(0, 1), (2, 3)]},
        "check_cluster": "called on ranks",
    },
    "cluster.options": {"Check": {"layout": None, "backend": ...}},  # texts that become records, checked
    "labs.table": {"Lab": "made by the table of labs", "lab_named": {"chapter": "05"}},
    "labs.sheet": {
        **{name: LAB_RUN for name in ("modelled", "modelled_sent", "modelled_sums", "sheet", "compare", "form")},
    },
    "train.options": {
        "Options": {"model": ..., "layout": ..., "backend": ...},  # texts that become records, checked
        "read": "reads the command line",
        "layout_for": {"text": "dp=2", "batch_size": None},
    },
    "train.health": {
        "differences": {"of_ranks": [{"the loss": "1"}, {"the loss": "1"}]},
        "slowest_rank": {"seconds": RANKS, "factor": 1.2},
    },
    "train.watch": {
        **dict.fromkeys(("look", "read_run"), "read the logs in a folder"),
        "run_table": "called with what look returned",
    },
    "train.plan": {},
    "training.data": {},
    "training.offload": {},
    "model.moe": {"limit_groups": {"choice_TE": torch.randn(6, 8), "num_groups": 4, "max_groups": 2}},
    "model.attention": {
        "check_choices": {"attention": "fused", "recompute": "none"},
        "fused_attention": HEADS,
        "standard_attention": HEADS,
        "drop": {"x": torch.zeros(2), "probability": 0.5},
    },
    "model.llama": {
        "rope_tables": {"positions_S": torch.arange(4), "dtype": torch.float32},
        "build": {"device": ...},  # torch's own sentence
    },
    "training.precision": {
        "precision_named": {"name": "fp32"},
        "accumulate_in_fp32": PARAMETERS,
        "scale_gradients": PARAMETERS | {"factor": 0.5},
    },
    "training.loop": {
        "make_optimizer": {"precision": "fp32"},
        "train_step": {"optimizer": torch.optim.SGD(LINEAR.parameters()), "precision": "fp32", "scaler": ...},
        "accumulate_gradients": {"precision": None},
    },
    "flops": {"stage_flops": {"layers": [2, 2]}},
    "timing.collectives": {
        **{
            name: {"name": "all_reduce", "network": link("efa"), "per_node": 2, "payload_bytes": 64.0}
            for name in ("collective_costs", "fastest", "collective_s", "bus_bandwidth")
        }
    },
    "timing.context": {"tokens_that_hide_a_hop": {"queries_per_key": 1.0}},
    "timing.step": {},
    "timing.tensor": {},
    "timing.data": {"crossing_s": {"link_bytes": LINK_BYTES}},
    "timing.timelines": {
        "copy_spans": {"layer_s": 1.0, "copy_s": 0.5},
        "dp_spans": {"bucket_comm_s": [0.1]},
        "expert_layer_spans": {"seconds": {"attention": 4.0, "dispatch": 2.0, "experts": 4.0, "combine": 2.0}},
        "ring_spans": {"kv_bytes": 8.0, "forward_s": [1.0], "backward_s": [2.0]},
        "zero3_backward_spans": {"units": ["a", "b"]},
        "zero3_spans": {"passes_s": (1.0, 2.0), "gather_s": 0.5, "reduce_s": 0.5},
    },
    "timing.failures": {
        "Failures": {"mtbf_s": 100.0, "save_s": 10.0, "restart_s": 10.0},
        **{name: {"interval_s": 100.0} for name in ("shares", "goodput", "simulated_goodput")},
    },
    "timing.rates": {},
    "plan.job": {
        "Job": {"num_gpus": 8, "seq_len": 64, "batch_tokens": 512, "framework": None},
        "work_out": {"job": JOB, "layout": Layout(dp=2)},
    },
    "memory.run": {"Run": {"recipe": "fp32"}},
    "memory.papers": {},
    "memory.states": {
        "Recipe": {"param_bytes": 2, "grad_bytes": 2, "master_bytes": 4, "moment_bytes": 8, "compute_bytes": 2},
        "StateBytes": {"parameters": 8, "gradients": 8, "optimizer": 16},
        "LoRA": {"rank": 4},
    },
    "memory.budget": {
        "fits": {"budget": budgets(RUN)[0], "gpu_or_key": "h100"},
        "largest_that_fits": {"budget_of": partial(budget, preset("toy"), seq_len=64)},
    },
    "memory.zero": {"zero_state_bytes": {"units": [8, 4]}},
    "memory.stages": {"stage_parameters": {"layers": [2, 2]}, "balanced_layers": {"num_stages": 2}},
    "plots.collectives": {
        "show_ring_all_reduce": {"values": RANKS},
        "show_collectives": {"of_ranks": [{"all-reduce": ([1], [2])}]},
    },
    "plots.concepts": {"show_concept": {"name": "merge"}, "show_charts": "takes charts one by one"},
    "plots.comparison": {"show_comparison": {"rows": [KindComparison("parameters", 10, 9)]}},
    "plots.context": {
        "show_memory_by_length": {"curves": {"cp 1": {1: 2.0, 2: 3.0}}},
        "show_work": {"shardings": ["zigzag"]},
        "show_documents": {"lengths": [2, 2], "cuts": {"contiguous": [[0, 1], [2, 3]]}},
    },
    "plots.curves": {
        "show_curves": {"lines": {"model": CURVE}, "points": {"measured": CURVE}},
        "show_bandwidth": {"published": {"measured": CURVE}, "models": {"model": CURVE}},
        "show_alpha_beta": {},
    },
    "plots.rank_traces": {"show_rank_traces": {"traces": [RANK_TRACE]}},
    "measure.trace": {"seconds_of": {"trace": RANK_TRACE}, "lines_of": {"trace": RANK_TRACE}},
    "plots.data_parallel": {
        "show_buckets": {"sizes": {"w": 4, "b": 2}, "buckets": [["b"], ["w"]]},
    },
    "plots.experts": {
        "show_load": {"load": [1, 2, 3, 4]},
        "show_traffic": {"rows": [[1, 2], [3, 4]], "row_bytes": 8},
        "show_balance": {"loads": {"none": [[1.0, 2.0], [2.0, 2.0]]}},
        "show_parameters": {"parameters": {"dense": (4.0, 4.0)}},
        "grouped_share_of_peak": {"rows": 8.0},
        "show_rows_per_expert": {"points": {"one": 8.0}},
    },
    "plots.choosing": {"show_checkpoint_interval": {}},
    "plots.five_d_costs": {
        "show_pipeline_memory": {"of_ranks": budgets(RUN), "gpus": [gpu("h100")]},
        "show_costs": {"sent_bytes": {"tp": 3, "data": 4}, "seconds": {"compute": 1.0}},
    },
    "plots.holdings": {"show_holdings": {}},
    "plots.ladder": {"show_ladder": {"steps_bytes": {"naive": 1.0, "better": 2.0}}},
    "plots.memory": {"show_budgets": {"budgets": {"toy": budgets(RUN)[0]}, "gpus": [gpu("h100")]}},
    "plots.pipeline": {
        "show_schedule": {},
        "show_schedules": {"simulations": [simulate(SCHEDULE)]},
        "show_stages_of_model": {"layers_of_stage": [2, 2]},
        "show_warm_up": {},
        "show_live": {},
    },
    "plots.precision": {"show_magnitudes": {"magnitudes": {"gradients": torch.ones(3)}, "name": "fp16"}},
    "plots.tiles": {
        "show_squares": {"kinds": {"parameters": 4}, "caption": "1 byte"},
    },
    "plots.timeline": {
        "show_overlap": {"spans": [Span(0, "compute", "forward", 0.0, 1.0)]},
        "show_step_times": {"seconds": {"dp": (1.0, 2.0)}},
    },
    "claims.record": {
        "Claim": "made by ledger, from rows that it checks",
        "claims": {"topic": "zero", "verdict": "wrong", "chapter": "04", "word": ...},
        "claims_named": {"ids": ["C003"]},
    },
    "claims.page": {"Quiz": {"claims": (CLAIM,)}, "chapter_quiz": {"chapter": "04", "ids": ("C056",)}},
    "hardware": {
        "GPU": in_floats(gpu("h100")) | {"per_node": 8},
        "Link": in_floats(link("efa")) | {"measured": False, "by_nodes": True},
        "Cluster": {"inside": link("nvlink4"), "between": link("efa")},
        "link": {"key": "efa"},
        "published_link": {"num_nodes": 2},
    },
    "plan.config_files": {
        "export": {"option": work_out(JOB, Layout(dp=2))},
        "accelerate_fsdp2": {"wrap": ["Block"], "precision": "bf16"},
        "accelerate_deepspeed_file": {"deepspeed_json": "zero3.json"},
        "deepspeed": {"stage": 3},
    },
}


def public(module) -> list[str]:
    """What checks its arguments: functions under `checked`, records that have a `__post_init__`."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and getattr(value, "__module__", "") == module.__name__
        and (
            getattr(value, "__code__", None) is OF_CHECKED
            or (inspect.isclass(value) and hasattr(value, "__post_init__"))
        )
        and inspect.signature(value).parameters
        and (not module.__name__.startswith(DRAWN) or name in MODULES[module.__name__.partition(".")[2]])
    ]


OF_CHECKED = checked(len).__code__
# Of pictures: what notebooks call. The rest of their functions take what these make.
DRAWN = ("course_lib.plots",)


def cases() -> list[tuple[str, str]]:
    return [
        (module, name)
        for module, table in MODULES.items()
        for name in public(import_module(f"course_lib.{module}"))
        if not isinstance(table.get(name), str)
    ]


def working_call(module: str, name: str) -> dict:
    """Arguments with which the function works."""
    function, own = getattr(import_module(f"course_lib.{module}"), name), MODULES[module].get(name, {})
    arguments = {}
    for parameter in inspect.signature(function).parameters.values():
        if own.get(parameter.name) is ...:
            continue
        if parameter.name in own:
            arguments[parameter.name] = own[parameter.name]
        elif parameter.default is not parameter.empty:
            arguments[parameter.name] = parameter.default
        elif parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            arguments[parameter.name] = VALUES[parameter.name]
    arguments.pop("changes", None)
    return arguments


class Nonsense:
    """Of a type that nothing takes."""


def wrong_values(name: str, value: object) -> list:
    """What cannot be meant in place of that value."""
    wrong = [Nonsense()]
    if isinstance(value, bool):
        return [*wrong, "text"]
    if isinstance(value, int | float):
        wrong += ["text", -1, math.nan, math.inf, HUGE]
        wrong += [2.5] if isinstance(value, int) else []
        return wrong + ([0] if NEVER_ZERO.fullmatch(name) else [])
    if isinstance(value, str):
        return [*wrong, 3] + ([] if FREE.fullmatch(name) else ["nonsense"])
    return wrong if value is None else [*wrong, 3, "nonsense", None]


def outcome(function, arguments: dict) -> str:
    """ "refused", "accepted", or what came instead of a refusal."""
    try:
        with time_limit():
            result = function(**arguments)
            if hasattr(result, "__enter__"):
                result.__enter__()
    except (TypeError, ValueError) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raised_here = "course_lib" in frame.filename and linecache.getline(frame.filename, frame.lineno).strip()
        if raised_here and raised_here.startswith("raise ") and str(error) and "\n" not in str(error):
            return "refused"
        return f"stack: {frame.name}, line {frame.lineno}: {error!r}"
    except BaseException as error:
        return f"stack: {error!r}"
    finally:
        plt.close("all")
    return "accepted"


class time_limit:
    """A block that takes longer than LIMIT_S ends with an error that is no Exception, so that nothing catches it."""

    def __enter__(self):
        signal.signal(signal.SIGVTALRM, self.stop)
        signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)

    def __exit__(self, *_):
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    @staticmethod
    def stop(*_):
        raise SystemExit(f"it took longer than {LIMIT_S} s")


def under_test(module: str, name: str):
    """The function or record of that name."""
    return getattr(import_module(f"course_lib.{module}"), name)


def verdicts(module: str, name: str) -> dict[tuple[str, str], str]:
    """(parameter, wrong value as text) -> outcome, of every wrong call of a function."""
    function, arguments = under_test(module, name), working_call(module, name)
    found = {}
    for parameter, value in arguments.items():
        if (name, parameter) == ("GPU", "link"):
            continue  # a key that is looked up, and refused, by link()
        for wrong in wrong_values(parameter, value):
            what = outcome(function, arguments | {parameter: wrong})
            if what == "accepted" and wrong == HUGE:
                what = "refused"  # that is: done at once
            found[parameter, repr(wrong)[:20]] = what
    return found


@pytest.mark.slow
def test_every_picture_that_a_notebook_names_checks_its_arguments():
    modules = [module for module in map(import_module, names_of_modules()) if module.__name__.startswith(DRAWN)]
    bare = [
        f"{module.__name__}.{name}"
        for module in modules
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
        and inspect.signature(value).parameters and not hasattr(value, "__wrapped__")
        and inspect.signature(value).return_annotation is None and name.startswith("show_")
    ]  # fmt: skip
    assert len(modules) > 20 and bare == []


def names_of_modules() -> list[str]:
    found = pkgutil.walk_packages(course_lib.__path__, "course_lib.")
    return [module.name for module in found if "__" not in module.name]


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    monkeypatch.setattr(plt, "show", lambda: None)


@pytest.mark.parametrize(("module", "name"), cases(), ids=[".".join(case) for case in cases()])
def test_nonsense_is_refused_in_one_sentence(module, name):
    assert outcome(under_test(module, name), working_call(module, name)) == "accepted"
    found = verdicts(module, name)
    assert {key: what for key, what in found.items() if what != "refused"} == {}
