"""Parts of a model on ranks: wrong ones are seen, and told in a sentence."""

import pytest
import torch.nn.functional as F

from course_lib import comm
from course_lib.launch import RankError
from course_lib.minimal.compare_parts import (
    compare_mlp,
    compare_vocab_loss,
    show_mlp_gradients,
)
from course_lib.minimal.tensor import sum_out, vocab_parallel_cross_entropy

pytestmark = pytest.mark.launches


def my(x, group, dim):
    return x.chunk(group.size(), dim)[group.rank()]


def gelu_of_partial_sums(x_TD, a_DF, b_FD, group):
    y_TF_partial = my(x_TD, group, 1) @ my(a_DF, group, 0)
    return comm.all_reduce(my(F.gelu(y_TF_partial), group, 1) @ my(b_FD, group, 0), group)


def two_mlps(x_TD, weights, enter, leave, group):
    for a_Df, b_fD in weights:
        x_TD = x_TD + leave(F.gelu(enter(x_TD, group) @ a_Df) @ b_fD, group)
    return x_TD


def test_gelu_of_partial_sums_is_wrong():
    assert not compare_mlp(gelu_of_partial_sums, 2).is_right


def test_what_has_another_shape_is_told_in_a_sentence():
    with pytest.raises(RankError, match=r"returned \(32, 256\); return z_TD, a tensor of shape \(32, 64\)"):
        compare_mlp(lambda x_TD, a_DF, b_FD, group: x_TD @ a_DF, 2)


def test_wrong_gradients_are_shown_in_percent_and_right_ones_as_right(capsys):
    errors = show_mlp_gradients(two_mlps, lambda x, group: x, sum_out, 2)
    shown = capsys.readouterr().out
    assert f"'A1': '{errors['A1']:.0%}'" in shown and "'loss': 'right'" in shown and shown.count("right") == 3


def test_a_wrong_loss_is_seen():
    assert not compare_vocab_loss(lambda z, y, group: vocab_parallel_cross_entropy(2 * z, y, group), 2).is_right
