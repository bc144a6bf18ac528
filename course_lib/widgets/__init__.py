"""Things to play with in a notebook: the host of panels, and a run that is watched.

host.py      play(panel): controls, a picture, a sentence
measure.py   what a panel's Measure does: a small model trained for real, laid on what is predicted
watch.py     a run watched from its logs, while it trains and after it
"""

try:
    import ipywidgets
except ImportError as error:
    raise ImportError(
        "course_lib.widgets needs ipywidgets, which is not installed; run: pip install 'ipywidgets>=7.7.1,<9' "
        "(everything else of course_lib works without it)"
    ) from error

from course_lib.widgets.host import play
from course_lib.widgets.measure import measure_layout, measure_memory, measure_zero
from course_lib.widgets.watch import watch

__all__ = ["measure_layout", "measure_memory", "measure_zero", "play", "watch"]
