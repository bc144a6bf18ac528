"""The command line of the trainer: texts become records, and what cannot be is refused before ranks wait."""

import re

import pytest
from torch.distributed.run import get_args_parser

from course_lib import checkpoint
from course_lib.config import preset
from course_lib.layout import Layout
from course_lib.train import Checkpoints, TrainPlan, trainer
from course_lib.train import log as train_log
from course_lib.train.options import check_world, layout_for, model_named, read


def test_options_become_records():
    text = "--model mini --layout dp=2,tp=2 --batch 8 --steps 30 --seq-len 32 --learning-rate 1e-3 --warmup 3"
    text += " --decay cosine --clip-norm None --checkpoint runs/a --every 7 --in-background"
    config, layout, plan, checkpoints, options = read(text.split())
    assert (config, layout) == (preset("mini"), Layout(dp=2, tp=2, micro_batches=4))
    assert plan == TrainPlan(30, 32, learning_rate=1e-3, warmup=3, decay="cosine", clip_norm=None)
    assert checkpoints == Checkpoints("runs/a", every=7, in_background=True) and options.logs is None
    assert read([])[2:4] == (TrainPlan(), None)


@pytest.mark.parametrize(
    "wrong, said",
    [
        ("--stepz 3", "Unrecognized options: --stepz"),
        ("--steps three", "Error parsing --steps"),
        ("--checkpoint a --every 0", "every is 0"),
    ],
)
def test_options_that_cannot_be_read_are_told_by_one_rank(wrong, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        read(wrong.split())
    assert said in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        read(wrong.split(), aloud=False)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "wrong, error",
    [
        ("--model toy --layout tp=3", "num_heads"),
        ("--layout cp=2 --seq-len 33", "33"),
        ("--every 7", "say more of checkpoints, and there are none; give checkpoint"),
        ("--in-background", "say more of checkpoints, and there are none; give checkpoint"),
        ("--model toy,vocab_size=100", r"vocab_size \(100\) must be at least 256: each byte of the text is a token"),
    ],
)
def test_records_that_do_not_fit_each_other_are_a_value_error(wrong, error):
    with pytest.raises(ValueError, match=error):
        read(wrong.split())


def test_torchrun_takes_no_option_of_the_script_for_its_own(capsys):
    """Its parser looks at what stands behind the script too, and shortened names of its own options count."""
    with pytest.raises(SystemExit):
        read(["--help"])
    ours = re.findall(r"(?<=\s)--[a-z-]+", capsys.readouterr().out)
    assert {"--layout", "--clip-norm", "--checkpoint"} < set(ours)
    for option in sorted(set(ours) - {"--help"}):
        options = get_args_parser().parse_args(["-m", "course_lib.train", option, "1"])
        assert options.training_script_args == [option, "1"]
    with pytest.raises(SystemExit):
        get_args_parser().parse_args(["-m", "course_lib.train", "--log", "1"])


def test_a_model_is_a_preset_with_changes():
    assert model_named("toy") == preset("toy")
    changed = model_named("toy,num_layers=2, family=gpt,num_kv_heads=8,dropout=0.1,tied=true")
    assert (changed.num_layers, changed.family, changed.dropout, changed.tied) == (2, "gpt", 0.1, True)
    assert model_named("toy,num_heads=4").head_dim == 16
    for text, error in [
        ("tiny", "preset is .tiny.; choose from toy"),
        ("toy,layers=2", "'layers=2' in model .* is not a change"),
        ("toy,num_layers=two", "num_layers is 'two'; it must be like 4"),
        ("toy,dropout=0.1", "Llama has none"),
    ]:
        with pytest.raises(ValueError, match=error):
            model_named(text)


def test_a_batch_size_gives_every_layout_its_accumulation():
    for text, micro_batches in [("dp=1", 8), ("dp=2,tp=2", 4), ("dp=2,micro_batch=2,pp=2,schedule=afab", 2)]:
        layout = layout_for(text, 8)
        assert (layout.micro_batches, layout.sequences_per_step) == (micro_batches, 8)
    assert layout_for("dp=2,micro_batches=4", 8) == layout_for("dp=2", 8)
    assert layout_for("dp=2", None) == Layout(dp=2)
    for text, error in [
        ("dp=3", r"batch \(8\) must be a multiple of dp x micro_batch \(3\); choose 6 or 9"),
        ("dp=2,micro_batches=3", "has 6 sequences a step"),
    ]:
        with pytest.raises(ValueError, match=error):
            layout_for(text, 8)
    with pytest.raises(ValueError, match=r"batch \(-3\) must .*; choose 2$"):
        layout_for("dp=2", -3)


def test_dp_auto_takes_all_ranks_and_keeps_the_batch():
    for text, world_size, expected in [
        ("dp=auto", 4, Layout(dp=4, micro_batches=2)),
        ("dp=auto", 1, Layout(micro_batches=8)),
        ("tp=2, dp = auto,zero_stage=1", 4, Layout(dp=2, tp=2, zero_stage=1, micro_batches=4)),
        ("tp=2,dp=auto,zero_stage=1", 2, Layout(tp=2, zero_stage=1, micro_batches=8)),
        ("pp=2,dp=auto,micro_batch=2", 4, Layout(dp=2, pp=2, micro_batch=2, micro_batches=2)),
    ]:
        layout = layout_for(text, 8, world_size)
        assert layout == expected and (layout.world_size, layout.sequences_per_step) == (world_size, 8)
    assert read(["--layout", "dp=auto", "--batch", "8"], world_size=2)[1] == Layout(dp=2, micro_batches=4)
    for text, batch, world_size, error in [
        ("dp=auto", None, 4, "^layout dp=auto takes all ranks, and there is no batch to share; give --batch"),
        ("dp=auto,tp=2", 8, 3, r"groups of cp x tp x pp \(2\), but there are 3; start 2 ranks or a multiple"),
        ("dp=auto,tp=2", 8, 6, r"batch \(8\) .* dp x micro_batch \(3\); start 2, 4, 8, 16 ranks"),
        ("dp=auto,micro_batch=2", 9, 2, r"\(4\); give a multiple of micro_batch \(2\)"),
        ("dp=auto,micro_batches=4", 8, 4, "layout dp=4,micro_batches=4 has 16 sequences a step; leave out micro"),
        ("dp=auto,ep=3", 8, 4, "ep"),
    ]:
        with pytest.raises(ValueError, match=error):
            layout_for(text, batch, world_size)


def test_a_wrong_number_of_ranks_names_commands_that_start_the_right_one():
    check_world(Layout(dp=2), 2)
    with pytest.raises(ValueError) as error:
        check_world(Layout(dp=2, tp=2, pp=2), 4, "srun")
    text = str(error.value)
    assert "needs 8 ranks (pp 2 x dp 2 x tp 2), but there are 4" in text and "srun --ntasks 8" in text
    for nodes, each in re.findall(r"--nnodes (\d+) --nproc-per-node (\d+)", text):
        assert int(nodes) * int(each) == 8
    assert "--nproc-per-node 8" in text
    with pytest.raises(ValueError, match="--multi_gpu --num_processes 2 .*--cpu starts one"):
        check_world(Layout(tp=2), 1, "accelerate")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (checkpoint.CannotWrite("c could not be written"), "train: c could not be written\n"),
        (train_log.CannotLog("l could not be written"), "train: rank 0: l could not be written\n"),
    ],
)
def test_a_disk_that_fills_during_a_run_is_one_line(error, said, capsys, monkeypatch):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(trainer, "join_world", lambda *_, **__: "gloo")
    monkeypatch.setattr(trainer, "train", fail)
    assert trainer.main([]) == 2
    assert capsys.readouterr().err == said
