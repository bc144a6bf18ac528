"""Schedules of many sizes, for the tests of schedules, checker, closed forms and simulator."""

from course_lib.schedules import SCHEDULES, check_request, make

V_OF = {"interleaved": (1, 2, 3)}


def sizes(ranks=(1, 2, 3, 4), micro_batches=(1, 2, 3, 4, 5, 6, 8, 9, 12)):
    """(name, pp, m, v) of every schedule that there is."""
    for name in SCHEDULES:
        for pp in ranks:
            for m in micro_batches:
                for v in V_OF.get(name, (1,)):
                    try:
                        check_request(name, pp, m, v)
                    except ValueError:
                        continue
                    yield name, pp, m, v


def schedules(**choices):
    for case in sizes(**choices):
        yield case, make(*case)
