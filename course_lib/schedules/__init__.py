"""Pipeline schedules as data: drawn, clocked, checked and executed from the same lists. They need no torch.

instructions.py  what a schedule is made of, and what each instruction needs
builders.py      1F1B, interleaved, Zero Bubble, DualPipeV, and simpler schedules
check.py         whether a schedule can run: what is wrong, where, what would be right
bubbles.py       closed forms: what is waited, what is kept, and when they hold
messages.py      who sends what to whom, and when it has come
simulator.py     a clock for schedules: who waits, and what is kept meanwhile
"""

from course_lib.schedules.bubbles import bubble, interleaving_memory, peak_live
from course_lib.schedules.builders import (
    SCHEDULES,
    all_forward_all_backward,
    check_request,
    dualpipe_v,
    interleaved_1f1b,
    make,
    naive,
    one_f_one_b,
    placement,
    stages_per_rank,
    zb_h1,
    zb_h2,
    zbv,
)
from course_lib.schedules.check import chart_problems, problems
from course_lib.schedules.instructions import Instruction, Schedule, from_lists, from_text
from course_lib.schedules.simulator import Costs, Simulation, simulate, text_chart
