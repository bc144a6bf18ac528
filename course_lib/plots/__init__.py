"""Pictures: each module turns a record into the numbers that it draws; each `show_...` ends in `plt.show()`.

palette.py       one colour for one kind of memory and one mesh axis
style.py         sizes, fonts, units; nothing outside a picture is changed
memory.py        show_memory_timeline, show_budgets
ladder.py        show_ladder
collectives.py   show_collective, show_ring_all_reduce
mesh.py          show_mesh
timeline.py      show_overlap
curves.py        show_bandwidth, show_throughput, show_alpha_beta, show_curves
formats.py       show_float_formats
"""
