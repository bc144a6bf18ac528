"""The graders of the exercises: a folder for each chapter, on a small framework.

core.py          fresh numbers, real ranks, named misconceptions
observe.py       an answer at work on real ranks: what it returned, sent and received
trainers.py      trainers: the result of one process, no more bytes than needed
ch00/ ... ch12/  the graders of a chapter; `from course_lib.checks.ch00 import check_...`
"""
