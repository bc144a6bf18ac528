"""`python -m course_lib.train`: the trainer as a script."""

import os
import sys

from torch.distributed.elastic.multiprocessing.errors import record

from course_lib.train.trainer import main

if __name__ == "__main__":
    code = record(main)()  # torchrun's summary then shows the traceback of the rank that failed first
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no interpreter shutdown: gloo's threads outlive their groups, and one that then asks Python for
    # its lock is ended with a SIGABRT
