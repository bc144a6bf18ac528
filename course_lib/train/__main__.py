"""`python -m course_lib.train`, or `course train`: the trainer as a script."""

from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors import record

from course_lib.launch.rendezvous import end_script
from course_lib.train.options import Options
from course_lib.train.trainer import main


def run_as_script(options: Options | None = None) -> NoReturn:
    """Train, and end this process with the exit code; without options they are read from the command line."""
    code = record(main)(options)  # torchrun's summary then shows the traceback of the rank that failed first
    end_script(code)


if __name__ == "__main__":
    run_as_script()
