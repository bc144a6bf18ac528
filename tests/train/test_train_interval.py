"""A save is measured on all ranks, and leaves nothing on the disk."""

from course_lib.launch import launch
from course_lib.layout import Layout
from course_lib.parallel import engine as engines
from course_lib.parallel import five_d
from course_lib.train.interval import save_seconds
from course_lib.train.options import model_named


def measure(folder: str) -> float:
    engine = five_d.build(model_named("toy,num_layers=1,d_model=32,d_ff=64,num_heads=4,num_kv_heads=2"), Layout(dp=2))
    return save_seconds(engine, engines.make_optimizer(engine), folder, repeats=2)


def test_all_ranks_get_the_same_seconds_and_the_folder_is_empty_again(tmp_path):
    results = launch(measure, 2, str(tmp_path))
    assert results[0] == results[1] > 0
    assert list(tmp_path.iterdir()) == []
