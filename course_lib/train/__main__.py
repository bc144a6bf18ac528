"""`python -m course_lib.train`: the trainer as a script."""

from torch.distributed.elastic.multiprocessing.errors import record

from course_lib.train.trainer import main

if __name__ == "__main__":
    raise SystemExit(record(main)())  # torchrun's summary then shows the traceback of the rank that failed first
