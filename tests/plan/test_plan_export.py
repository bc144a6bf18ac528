"""Files for other frameworks: their parsers read them, or their fields are known; what they cannot do is refused."""

import shlex
import tomllib
from dataclasses import replace

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from random_layouts import MODELS, SEQ_LEN, random_layouts

from course_lib.cli.plan import write_files
from course_lib.config import preset
from course_lib.hardware import Cluster, gpu, link
from course_lib.layout import Layout
from course_lib.plan import Job, export, work_out
from course_lib.run import Offload, Run
from course_lib.tensors import LoRA
from course_lib.train.options import read

H100 = Cluster(gpu("h100"), link("nvlink4"), link("ib-ndr400"))
FP32_GRADS = "bf16-master-fp32-grads"
ALL = [
    "dp=16,zero_stage=3,micro_batches=2",
    "dp=16,micro_batches=2",
    "dp=4,tp=2,pp=2,sequence_parallel=true,zero_stage=1,micro_batches=8",
    "dp=4,tp=4,sequence_parallel=true,zero_stage=3,micro_batches=8,recompute=full",
    "dp=2,tp=2,pp=4,sequence_parallel=true,schedule=interleaved,v=2,micro_batches=16,recompute=selective",
    "dp=4,cp=2,pp=2,schedule=zb_h1,micro_batches=8",
    "dp=4,cp=4,micro_batches=8",
    "dp=4,tp=4,pp=2,sequence_parallel=true,zero_stage=1,micro_batches=8,recompute=full",
]

# https://github.com/huggingface/nanotron/tree/2411b022a75f/src/nanotron/config: config.py, parallelism_config.py
NANOTRON = {
    "model": "ddp_bucket_cap_mb dtype init_method make_vocab_size_divisible_by model_config",
    "optimizer": "accumulate_grad_in_fp32 clip_grad learning_rate_scheduler optimizer_factory weight_decay zero_stage",
    "parallelism": "dp pp tp pp_engine tp_mode tp_linear_async_communication recompute_layer tp_recompute_allgather "
    "expert_parallel_size context_parallel_size",
    "tokens": "batch_accumulation_per_replica limit_test_batches limit_val_batches micro_batch_size sequence_length "
    "train_steps val_check_interval",
}
# https://github.com/pytorch/torchtitan/blob/v0.2.1/torchtitan/config/job_config.py
TORCHTITAN = {
    "model": "name flavor hf_assets_path",
    "training": "local_batch_size global_batch_size seq_len max_norm steps dataset dtype mixed_precision_param",
    "parallelism": "data_parallel_replicate_degree data_parallel_shard_degree fsdp_reshard_after_forward "
    "tensor_parallel_degree enable_async_tensor_parallel pipeline_parallel_degree context_parallel_degree "
    "expert_parallel_degree expert_tensor_parallel_degree pipeline_parallel_schedule pipeline_parallel_microbatch_size "
    "context_parallel_rotate_method module_fqns_per_model_part",
    "activation_checkpoint": "mode selective_ac_option",
}
# https://github.com/NVIDIA/Megatron-LM/tree/d98e8a64ddf3: megatron/training/arguments.py, of which many are made of
# the fields of megatron/core/transformer/transformer_config.py; examples/megatron_fsdp/train_llama3_8b_fsdp_h100_fp8.sh
MEGATRON = """
num-layers hidden-size ffn-hidden-size num-attention-heads group-query-attention num-query-groups kv-channels
seq-length max-position-embeddings swiglu disable-bias-linear normalization norm-epsilon attention-dropout
hidden-dropout rotary-base use-rope-scaling rope-scaling-factor position-embedding-type
untie-embeddings-and-output-weights tensor-model-parallel-size sequence-parallel pipeline-model-parallel-size
context-parallel-size cp-comm-type use-distributed-optimizer num-distributed-optimizer-instances
use-megatron-fsdp data-parallel-sharding-strategy no-gradient-accumulation-fusion ckpt-format
expert-tensor-parallel-size moe-router-pre-softmax moe-router-load-balancing-type moe-aux-loss-coeff
moe-token-dispatcher-type expert-model-parallel-size num-experts moe-router-topk moe-ffn-hidden-size
micro-batch-size global-batch-size bf16 fp16 grad-reduce-in-bf16 accumulate-allreduce-grads-in-fp32
num-layers-per-virtual-pipeline-stage recompute-granularity recompute-method recompute-num-layers
"""


def option_of(text: str, recipe: str = FP32_GRADS, model: str = "llama-3.1-8b"):
    config, layout = preset(model), Layout.parse(text)
    seq_len = min(4096, config.max_seq_len)
    tokens = layout.sequences_per_step * seq_len
    return work_out(Job(config, H100, layout.world_size, seq_len, tokens, recipe), layout)


def torchtitan(option) -> str:
    return export(option)[0]["torchtitan.toml"]


def arguments(text: str) -> dict[str, str]:
    """Megatron-LM's arguments; one without a value has an empty text."""
    return dict((line.removeprefix("--") + " ").split(" ", 1) for line in text.splitlines())


def counted(name: str, text: str) -> tuple[int, int]:
    """How many ranks a file asks for (0: it does not say), and how many sequences of a step they have."""
    if name == "torchtitan.toml":
        found = tomllib.loads(text)
        sizes = {name.removesuffix("_degree"): size for name, size in found["parallelism"].items()}
        data = sizes["data_parallel_replicate"] * sizes["data_parallel_shard"]
        assert found["training"]["global_batch_size"] % (data * found["training"]["local_batch_size"]) == 0
        axes = ("tensor_parallel", "pipeline_parallel", "context_parallel")
        return data * sizes[axes[0]] * sizes[axes[1]] * sizes[axes[2]], found["training"]["global_batch_size"]
    if name == "megatron.args":
        return 0, int(arguments(text)["global-batch-size"])
    if name == "nanotron.yaml":
        found = yaml.safe_load(text)
        axes, tokens = found["parallelism"], found["tokens"]
        sequences = axes["dp"] * tokens["micro_batch_size"] * tokens["batch_accumulation_per_replica"]
        return axes["dp"] * axes["tp"] * axes["pp"], sequences
    words = text.split()
    layout = Layout.parse(words[words.index("--layout") + 1])
    return int(words[words.index("--nnodes") + 1]) * int(words[words.index("--nproc-per-node") + 1]), (
        layout.sequences_per_step
    )


@pytest.fixture(scope="module")
def exported():
    return {text: export(option_of(text)) for text in ALL}


def check_fields_of(sections: dict, known: dict) -> None:
    for name, values in sections.items():
        assert set(values) <= set(known[name].split()), name


def test_every_file_is_written_or_refused_with_a_reason(exported):
    written = set()
    for text, (files, refused) in exported.items():
        assert len(files) + len(refused) == 8 and not set(files) & set(refused), text
        assert all(reason.endswith("choose a run without") for reason in refused.values())
        written |= set(files)
    assert len(written) == 7


def test_expressions_of_engines_toml_and_of_templates_name_what_a_run_has():
    """On layouts drawn at random: a field that is not there would be no ValueError."""
    option = option_of("dp=8")
    for config in MODELS.values():
        for layout in random_layouts(config, 40, seed=2):
            files, refused = export(replace(option, run=Run(config, layout, SEQ_LEN)))
            assert len(files) + len(refused) == 8 and all("{" not in reason for reason in refused.values())


def test_files_have_the_ranks_and_the_batch_of_their_layout(exported):
    of_bf16 = {text: export(option_of(text, "bf16")) for text in (*ALL, "dp=4,pp=4,micro_batches=4,order=dp-pp-cp-tp")}
    for text, (files, _) in [*exported.items(), *of_bf16.items()]:
        layout = Layout.parse(text)
        for name in (name for name in files if not name.startswith(("accelerate", "deepspeed"))):
            ranks, sequences = counted(name, files[name])
            assert ranks in (0, layout.world_size) and sequences == layout.sequences_per_step, (text, name)


def test_torchtitan_has_these_fields(exported):
    files = [files["torchtitan.toml"] for files, _ in exported.values() if "torchtitan.toml" in files]
    assert len(files) == 5
    for text in files:
        check_fields_of(tomllib.loads(text), TORCHTITAN)


def test_torchtitan_reads_its_file(exported, tmp_path):
    reason = "torchtitan is not installed; pip install --no-deps torchtitan==0.2.1, and triton"
    config = pytest.importorskip("torchtitan.config", reason=reason, exc_type=ImportError)
    (tmp_path / "run.toml").write_text(exported[ALL[7]][0]["torchtitan.toml"])
    found = config.ConfigManager().parse_args(["--job.config_file", str(tmp_path / "run.toml")])
    parts = found.parallelism.module_fqns_per_model_part
    assert [len(part) for part in parts] == [17, 18]  # 16 layers each: with the embedding; with the last norm and head
    assert (found.model.flavor, found.training.local_batch_size, found.activation_checkpoint.mode) == ("8B", 8, "full")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "model", "said"),
    [
        ("dp=8,zero_stage=3,dp_replicate=2", "llama-3.1-8b", {"fsdp_reshard_after_forward": "always"}),
        ("dp=8,zero_stage=2", "llama-3.1-8b", {"fsdp_reshard_after_forward": "never"}),
        ("dp=8,zero_stage=3,dp_replicate=2", "llama-3.1-8b", {"data_parallel_replicate_degree": 2}),
        ("dp=8", "llama-3.1-8b", {"data_parallel_replicate_degree": 8, "data_parallel_shard_degree": 1}),
        ("dp=2,cp=2,zero_stage=3", "llama-3.1-8b", {"context_parallel_rotate_method": "alltoall"}),
        (
            "dp=2,cp=2,zero_stage=3,cp_method=all_gather",
            "llama-3.1-8b",
            {"context_parallel_rotate_method": "allgather"},
        ),
        (
            "dp=16,ep=8,tp=2,sequence_parallel=true,zero_stage=3",
            "deepseek-v3",
            {"expert_parallel_degree": 8, "expert_tensor_parallel_degree": 2, "data_parallel_shard_degree": 16},
        ),
        (
            "dp=16,ep=32,tp=2,sequence_parallel=true,zero_stage=3",
            "deepseek-v3",
            {"expert_parallel_degree": 32, "expert_tensor_parallel_degree": 1, "data_parallel_shard_degree": 16},
        ),
    ],
)
def test_torchtitan_is_told_each_choice(text, model, said):
    found = tomllib.loads(torchtitan(option_of(text, model=model)))["parallelism"]
    assert said.items() <= found.items()


def test_torchtitan_spreads_whole_experts_over_all_ranks_of_cp_and_tp_or_over_none():
    text = "dp=8,ep=2,tp=4,expert_tp=1,sequence_parallel=true,zero_stage=3"
    refused = export(option_of(text, model="deepseek-v3"))[1]["torchtitan.toml"]
    assert "no whole experts over ep 2, no multiple of cp x tp" in refused


def test_torchtitan_has_the_layers_of_each_stage():
    text = "dp=2,pp=2,zero_stage=1,schedule=interleaved,v=2,micro_batches=2,layers_of_stage=7-9-9-7"
    parts = tomllib.loads(torchtitan(option_of(text)))["parallelism"]["module_fqns_per_model_part"]
    assert [len(part) for part in parts] == [8, 9, 9, 9] and parts[1][0] == "layers.7" and parts[3][6] == "layers.31"
    option = option_of("dp=4,pp=6,zero_stage=1,micro_batches=6")
    parts = tomllib.loads(torchtitan(option))["parallelism"]["module_fqns_per_model_part"]
    assert [len(part) for part in parts] == [7, 6, 5, 5, 5, 7]


def test_nanotron_has_these_fields(exported):
    for text, (files, _) in exported.items():
        layout = Layout.parse(text)
        if "nanotron.yaml" in files:
            found = yaml.safe_load(files["nanotron.yaml"])
            check_fields_of(found, NANOTRON)
            assert found["optimizer"] == {"accumulate_grad_in_fp32": True, "zero_stage": layout.zero_stage}
            assert (found["parallelism"]["tp_mode"] == "REDUCE_SCATTER") == layout.sequence_parallel
            assert found["parallelism"]["recompute_layer"] == (layout.recompute == "full")
            assert found["model"]["model_config"]["rms_norm_eps"] == 1e-5  # a number: YAML takes 1e-05 for a text
    assert "recompute_layer: true" in exported[ALL[7]][0]["nanotron.yaml"]
    for regather in ("true", "false"):
        again = f"dp=2,tp=2,sequence_parallel=true,regather={regather}"
        assert f"tp_recompute_allgather: {regather}\n" in export(option_of(again))[0]["nanotron.yaml"]


def test_megatron_has_these_arguments(exported):
    for text, (files, _) in exported.items():
        if "megatron.args" in files:
            lines = arguments(files["megatron.args"])
            assert set(lines) <= set(MEGATRON.split())
            layout = Layout.parse(text)
            assert int(lines["tensor-model-parallel-size"]) == layout.tp
            assert ("sequence-parallel" in lines) == layout.sequence_parallel
            assert ("use-megatron-fsdp" in lines) == (layout.zero_stage > 1)
    interleaved = exported[ALL[4]][0]["megatron.args"]
    assert "--num-layers-per-virtual-pipeline-stage 4\n" in interleaved  # 32 layers, 4 ranks of 2 stages


def test_megatron_builds_the_model_that_was_planned():
    """Without these its defaults are another model: biases, dropout 0.1, RoPE's base 10,000, no loss of balance."""
    llama = arguments(export(option_of("dp=8,zero_stage=1"))[0]["megatron.args"])
    assert "disable-bias-linear" in llama and llama["attention-dropout"] == llama["hidden-dropout"] == "0.0 "
    assert (llama["rotary-base"], llama["rope-scaling-factor"]) == ("500000 ", "8.0 ")
    gpt2 = arguments(export(option_of("dp=8", model="gpt2"))[0]["megatron.args"])
    assert "disable-bias-linear" not in gpt2 and gpt2["hidden-dropout"] == "0.1 " and "rotary-base" not in gpt2
    moe = arguments(
        export(option_of("dp=8,tp=2,ep=4,sequence_parallel=true", model="mixtral-8x7b"))[0]["megatron.args"]
    )
    assert set(moe) <= set(MEGATRON.split())
    sizes = ("expert-model-parallel-size", "expert-tensor-parallel-size", "moe-aux-loss-coeff")
    assert [moe[name] for name in sizes] == ["4 ", "2 ", "0.02 "] and moe["moe-token-dispatcher-type"] == "alltoall "
    folded = export(option_of("dp=4,tp=2,ep=8,sequence_parallel=true", model="mixtral-8x7b"))[0]["megatron.args"]
    assert [arguments(folded)[name] for name in sizes[:2]] == ["8 ", "1 "]
    for method, named in (("ring", "p2p "), ("all_gather", "allgather "), ("ulysses", "a2a ")):
        text = f"dp=2,cp=2,cp_method={method}"
        assert arguments(export(option_of(text))[0]["megatron.args"])["cp-comm-type"] == named
    hybrid = arguments(export(option_of("dp=16,zero_stage=2,dp_replicate=2"))[0]["megatron.args"])
    assert hybrid["data-parallel-sharding-strategy"] == "optim_grads "
    assert hybrid["num-distributed-optimizer-instances"] == "2 "


@pytest.mark.parametrize(
    ("name", "recipe", "said"),
    [
        ("torchtitan.toml", "fp32", 'mixed_precision_param = "float32"'),
        ("torchtitan.toml", "bf16-master", 'dtype = "float32"\nmixed_precision_param = "bfloat16"'),
        ("torchtitan.toml", "bf16", '\ndtype = "bfloat16"'),
        ("megatron.args", "bf16-master", "--bf16\n--grad-reduce-in-bf16\n"),
        ("megatron.args", "fp16-master-fp32-grads", "--fp16\n--accumulate-allreduce-grads-in-fp32\n"),
        ("nanotron.yaml", "bf16", "accumulate_grad_in_fp32: false"),
        ("deepspeed.json", "fp32", '"enabled": false'),
        ("deepspeed.json", "fp16-master-fp32-grads", '"grad_accum_dtype": "fp32"'),
        ("accelerate_fsdp2.yaml", "fp32", "mixed_precision: 'no'"),
        ("course.sh", "fp32", "--precision fp32"),
    ],
)
def test_number_formats_are_fields(name, recipe, said, tmp_path):
    stage = {"nanotron.yaml": 1, "megatron.args": 1}.get(name, 3)
    write_files(option_of(f"dp=8,zero_stage={stage}", recipe), tmp_path, 8)
    assert said in (tmp_path / name).read_text()


def test_megatron_computes_in_fp32_unless_told():
    lines = arguments(export(option_of("dp=8,zero_stage=1", "fp32"))[0]["megatron.args"])
    assert not {"bf16", "fp16", "grad-reduce-in-bf16"} & set(lines)


def test_accelerate_reads_its_files(exported, tmp_path):
    for text in ALL[:2]:
        write_files(option_of(text, "bf16-master"), tmp_path / text, 8)
        for file in (tmp_path / text).glob("accelerate_[df]*.yaml"):
            config = load_config_from_file(str(file))
            assert (config.num_processes, config.num_machines) == (16, 2)
            assert file.read_text().startswith("# in your script: batches of 1 x 4,096 tokens for each rank")
    fsdp2 = (tmp_path / ALL[0] / "accelerate_fsdp2.yaml").read_text()
    assert "GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)" in fsdp2
    write_files(option_of("dp=8,zero_stage=3", "bf16-master", "mixtral-8x7b"), tmp_path / "moe", 8)
    assert "to_wrap: MixtralDecoderLayer" in (tmp_path / "moe" / "accelerate_fsdp2.yaml").read_text()


def test_the_trainer_reads_its_command(exported):
    for text in ALL:
        words = shlex.split(exported[text][0]["course.sh"].partition("-m course_lib.train ")[2])
        config, layout, plan, _, _ = read(words)
        assert (config, layout, plan.seq_len) == (preset("llama-3.1-8b"), Layout.parse(text), 4096)
        script, nodes = exported[text][0]["course.sbatch"], Layout.parse(text).world_size // 8
        assert f"--nodes={nodes}\n" in script and "--cpus-per-task=64\n" in script


@pytest.mark.parametrize(
    ("text", "name", "why"),
    [
        ("dp=4,tp=2,sequence_parallel=true,zero_stage=1", "torchtitan.toml", "ZeRO-1 without a pipeline"),
        ("dp=4,pp=2,zero_stage=3", "torchtitan.toml", "ZeRO-3 in a pipeline"),
        ("dp=4,ep=2", "torchtitan.toml", "ZeRO-0 beside tp, pp, cp or ep"),
        ("tp=4,sequence_parallel=true", "torchtitan.toml", "mixed precision beside tp or pp without dp or cp"),
        ("dp=2,cp=4,dp_replicate=4,zero_stage=3", "torchtitan.toml", "replicas that cut through cp"),
        ("dp=2,cp=2,zero_stage=3,cp_sharding=contiguous", "torchtitan.toml", "contiguous pieces"),
        ("dp=2,tp=2,sequence_parallel=true,regather=true,zero_stage=3", "torchtitan.toml", "regather"),
        (ALL[4], "torchtitan.toml", "recomputation selective"),
        ("dp=4,pp=2,zero_stage=1,micro_batches=4,order=dp-pp-cp-tp", "torchtitan.toml", "order dp-pp of ranks"),
        ("dp=4,pp=2,zero_stage=2", "megatron.args", "ZeRO-2 in a pipeline"),
        ("dp=4,cp=2,cp_sharding=striped", "megatron.args", "striped pieces"),
        (ALL[5], "megatron.args", "schedule zb_h1"),
        ("dp=8,pp=3,micro_batches=3", "megatron.args", "32 layers over 3 equal stages"),
        (ALL[6], "nanotron.yaml", "no cp in this file"),
    ],
)
def test_what_a_framework_cannot_do_is_refused(text, name, why):
    model = "mixtral-8x7b" if "ep=" in text else "llama-3.1-8b"
    files, refused = export(option_of(text, model=model))
    assert name not in files and why in refused[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "model", "name", "why"),
    [
        ("bf16-master", "llama-3.1-8b", "nanotron.yaml", "no recipe bf16-master"),
        ("fp32", "llama-3.1-8b", "nanotron.yaml", "no recipe fp32"),
        ("bf16", "llama-3.1-8b", "megatron.args", "no recipe bf16"),
        ("bf16", "llama-3.1-8b", "course.sh", "no recipe bf16"),
        (FP32_GRADS, "gpt2", "nanotron.yaml", "no models of the gpt family"),
        (FP32_GRADS, "gpt2", "torchtitan.toml", "no gpt2 among its models"),
        (FP32_GRADS, "deepseek-v3", "megatron.args", "no latent attention"),
        (FP32_GRADS, "xlm-r-base", "course.sh", "no models of the xlmr family"),
    ],
)
def test_number_formats_and_models_that_it_has_not_are_refused(recipe, model, name, why):
    files, refused = export(option_of("dp=8", recipe, model))
    assert name not in files and why in refused[name]


def test_what_no_file_says_is_refused_by_all(tmp_path):
    option = option_of("dp=8,zero_stage=3")
    for changes, why in [
        ({"optimizer": "adamw-8bit"}, "optimizer adamw-8bit"),
        ({"offload": Offload(optimizer="host")}, "offload"),
        ({"lora": LoRA(8), "layout": Layout(dp=8)}, "LoRA"),
        ({"attention": "standard"}, "attention that is not fused"),
    ]:
        told = write_files(replace(option, run=replace(option.run, **changes)), tmp_path, 8)
        assert len(told) == 9 and all(f"no {why}" in line.replace(", no", " no") for line in told[1:]), told


def test_a_flavor_that_torchtitan_lacks_is_told_and_is_no_other_model():
    option = option_of("dp=8,zero_stage=3")
    shorter = replace(
        option, run=replace(option.run, config=replace(preset("llama-3.1-8b"), num_layers=16, name="mine"))
    )
    text = export(shorter)[0]["torchtitan.toml"]
    assert "add the flavor mine to" in text and tomllib.loads(text)["model"] == {"name": "llama3", "flavor": "mine"}


def test_norms_of_queries_and_keys_are_an_argument_of_megatron_and_refused_elsewhere():
    option = option_of("dp=8")
    with_norms = replace(option.run, config=replace(option.run.config, name="mine", qk_norm=True))
    files, refused = export(replace(option, run=with_norms))
    assert [*files] == ["megatron.args"] and "qk-layernorm" in arguments(files["megatron.args"])
    assert "no norms of queries and keys" in refused["nanotron.yaml"]
    assert "no mine among its models" in refused["torchtitan.toml"]


def test_ranks_that_fill_no_nodes_are_refused():
    _, refused = export(option_of("dp=8"), gpus_per_node=3)
    assert "num_gpus (8) must fill nodes of 3; choose 6 or 9" in refused["course.sbatch"]
