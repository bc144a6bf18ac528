"""Pictures by form: a chapter's picture is data that it gives to a form; each `show_...` ends in `plt.show()`.

What a picture draws is computed by a function beside it, and tested. A picture that no cell computes is data here too:
it runs on Colab, in a copy of one notebook and without the repository, and its numbers stay the package's.

style.py         sizes, fonts, units, legends; nothing outside a picture is changed
tiles.py         form: rows of tiles, of what ranks hold
diagrams.py      form: boxes, arrows and words
timeline.py      form: lanes over time. show_overlap, show_step_times
memory.py        form: stacked bars and areas of bytes. show_memory_timeline, show_step_memory, show_budgets
curves.py        form: curves beside points. show_bandwidth, show_throughput, show_alpha_beta, show_curves
live.py          LiveCurve, drawn again while training goes on
five_d.py        form: ranks on nodes, with their groups. show_ranks
course_map.py    show_course: which chapter builds on which; the README's pictures, written into docs/
collectives.py   show_collectives, show_ring_all_reduce, show_ring, show_mesh, show_node
single_gpu.py    show_squares, show_block, show_counters, show_graph, show_tiles
precision.py     show_float_formats, show_numbers, show_magnitudes, show_mixed_step; show_lora, show_codes, show_choices
ladder.py        show_ladder
comparison.py    show_comparison: predicted beside measured, with the error
data_parallel.py  show_replicas, show_buckets, show_streams; of ZeRO show_zero_stages, show_flat_shards, show_flow
tensor.py        show_linear_pair, show_heads, show_vocabulary, show_f_and_g, show_vocab_loss
sequence.py      show_cuts, show_half_block, show_regions: hidden states cut by tokens, and what one rank holds
context.py       show_cut, show_chunks, show_mask, show_work, show_travel, show_merge, show_memory_by_length
pipeline.py      show_schedule, show_schedules
pipeline_concepts.py  show_cut, show_messages, show_trace, show_halves, show_stages_of_model, show_tradeoff
pipeline_trace.py  show_measured
stages.py        show_live: micro-batches in flight
experts.py       show_load, show_balance, show_parameters, show_routes, show_traffic
expert_concepts.py  show_dense_and_experts, show_expert_kinds, show_sorted_rows, show_travelling_rows, show_owners
holdings.py      which share of each part of a model the ranks of a layout hold
five_d_costs.py  show_pipeline_memory, show_costs
choosing.py      show_steps, show_cuts, show_options, show_front, show_waiting, show_flow_chart, show_two_hosts
run_log.py       show_run: loss, speed, memory and seconds of a run's ranks, from its logs
rank_traces.py   show_rank_traces: one step on every rank, side by side
"""
