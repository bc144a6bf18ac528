"""`course watch`: a run's ranks in a table that is renewed, read from the logs in its folder."""

import json as as_json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from tyro.conf import Positional

from course_lib.validate import number

_CLEAR = "\033[H\033[J"  # the cursor to the first line, and all below it away


def watch(folder: Positional[Path], once: bool = False, json: bool = False, every: float = 2.0) -> int:
    """Show the ranks of a run while they train: steps, loss, speed, memory, who is slow and who has stopped.

    Args:
        folder: what `course train --log-folder` was given
        once: show what is there now, and end; without it the table is renewed until the run has ended
        json: the same as one line of JSON each time
        every: seconds between two looks
    """
    from course_lib.train.watch import look, run_table

    number("every", every, above=0)
    while True:
        run = look(folder)
        text = as_json.dumps(asdict(run)) if json else "\n".join(run_table(run))
        clear = _CLEAR if sys.stdout.isatty() and not (once or json) else ""
        print(clear + text, flush=True)
        if once or run.ended:
            return 0
        try:
            time.sleep(every)
        except KeyboardInterrupt:
            return 0
