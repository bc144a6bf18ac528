"""A training run as one record: the name under which chapters, timings and traffic import it (memory/run.py has it)."""

from course_lib.memory.run import Run

__all__ = ["Run"]
