"""Pictures: each module turns a record into the numbers that it draws; each `show_...` ends in `plt.show()`.

palette.py       one colour for one kind of memory and one mesh axis
style.py         sizes, fonts, units; nothing outside a picture is changed
memory.py        show_memory_timeline, show_budgets
ladder.py        show_ladder
collectives.py   show_collective, show_ring_all_reduce
mesh.py          show_mesh
timeline.py      show_overlap, show_step_times
curves.py        show_bandwidth, show_throughput, show_alpha_beta, show_curves
formats.py       show_float_formats
sharding.py      show_zero_stages, show_stages, show_flat_shards, show_gathered
matrices.py      show_linear_pair, show_heads, show_vocabulary
regions.py       show_regions
"""
