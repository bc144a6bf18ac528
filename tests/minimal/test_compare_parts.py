"""Parts of a model on ranks are compared with one process: right ones are right, wrong ones are seen."""

import pytest
import torch.nn.functional as F

from course_lib import comm
from course_lib.launch import RankError
from course_lib.minimal.compare_parts import (
    compare_mlp,
    compare_vocab_loss,
    mlp_gradient_errors,
    show_mlp_gradients,
)
from course_lib.minimal.tensor import copy_in, sum_out, vocab_parallel_cross_entropy

pytestmark = pytest.mark.launches


def my(x, group, dim):
    return x.chunk(group.size(), dim)[group.rank()]


def columns_then_rows(x_TD, a_DF, b_FD, group):
    return comm.all_reduce(F.gelu(x_TD @ my(a_DF, group, 1)) @ my(b_FD, group, 0), group)


def gelu_of_partial_sums(x_TD, a_DF, b_FD, group):
    y_TF_partial = my(x_TD, group, 1) @ my(a_DF, group, 0)
    return comm.all_reduce(my(F.gelu(y_TF_partial), group, 1) @ my(b_FD, group, 0), group)


def two_mlps(x_TD, weights, enter, leave, group):
    for a_Df, b_fD in weights:
        x_TD = x_TD + leave(F.gelu(enter(x_TD, group) @ a_Df) @ b_fD, group)
    return x_TD


def gathered(logits_BSv, y_BS, group):
    logits_BSV = comm.join(logits_BSv, group, dim=-1)
    return F.cross_entropy(logits_BSV.flatten(0, 1), y_BS.flatten(), reduction="none").view_as(y_BS)


def test_columns_then_rows_send_one_narrow_sum():
    run = compare_mlp(columns_then_rows, 4)
    assert run.is_right and run.calls == {"all_reduce": 1}
    assert run.sent_bytes == 2 * 3 * 32 * 64 * 8 // 4


def test_gelu_of_partial_sums_is_wrong():
    assert not compare_mlp(gelu_of_partial_sums, 2).is_right


def test_what_has_another_shape_is_told_in_a_sentence():
    with pytest.raises(RankError, match=r"returned \(32, 256\); return z_TD, a tensor of shape \(32, 64\)"):
        compare_mlp(lambda x_TD, a_DF, b_FD, group: x_TD @ a_DF, 2)


def test_gradients_are_right_with_f_and_g_alone():
    assert max(mlp_gradient_errors(two_mlps, copy_in, sum_out, 2).values()) < 1e-12
    without_f = mlp_gradient_errors(two_mlps, lambda x, group: x, sum_out, 4)
    assert max(without_f["loss"], without_f["A2"], without_f["B2"]) < 1e-12
    assert min(without_f["x"], without_f["A1"], without_f["B1"]) > 0.5


def test_wrong_gradients_are_shown_in_percent_and_right_ones_as_right(capsys):
    errors = show_mlp_gradients(two_mlps, lambda x, group: x, sum_out, 2)
    shown = capsys.readouterr().out
    assert f"'A1': '{errors['A1']:.0%}'" in shown and "'loss': 'right'" in shown and shown.count("right") == 3


def test_a_loss_from_parts_sends_three_numbers_per_token_and_keeps_a_part():
    ours, naive = compare_vocab_loss(vocab_parallel_cross_entropy, 4), compare_vocab_loss(gathered, 4)
    assert ours.is_right and naive.is_right
    assert ours.sent_bytes == 3 * 2 * 3 * 32 * 8 // 4 and ours.calls == {"all_reduce": 3}
    assert naive.sent_bytes == 3 * 32 * 64 * 8 and (ours.kept, naive.kept) == (64, 256)


def test_a_wrong_loss_is_seen():
    assert not compare_vocab_loss(lambda z, y, group: vocab_parallel_cross_entropy(2 * z, y, group), 2).is_right
