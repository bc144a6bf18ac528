"""Pictures: each module turns a record into the numbers that it draws; each `show_...` ends in `plt.show()`.

palette.py       one colour for one kind of memory and one mesh axis
course_map.py    show_course: which chapter builds on which
readme.py        the README's pictures, written into docs/
style.py         sizes, fonts, units; nothing outside a picture is changed
memory.py        show_memory_timeline, show_budgets
context.py       show_mask, show_work, show_travel, show_memory_by_length
tokens.py        show_cut, show_merge, show_gradient_ring, show_chunks, show_heads_for_tokens, show_documents
comparison.py    show_comparison: predicted beside measured, with the error
holdings.py      which share of each part of a model the ranks of a layout hold
pipeline_tradeoff.py  bubble against memory, a point for each schedule
ladder.py        show_ladder
collectives.py   show_collectives, show_ring_all_reduce
ring.py          show_ring
node.py          show_node
mesh.py          show_mesh
timeline.py      show_overlap, show_step_times
curves.py        show_bandwidth, show_throughput, show_alpha_beta, show_curves
live.py          LiveCurve, drawn again while training goes on
formats.py       show_float_formats
precision.py     show_numbers, show_magnitudes, show_mixed_step
fine_tuning.py   show_lora, show_codes, show_blocks, show_choices
data_parallel.py  show_replicas, show_buckets, show_batch_tradeoff, show_streams
sharding.py      show_zero_stages, show_stages, show_flat_shards, show_gathered
single_gpu.py    show_squares, show_block, show_counters
zero_step.py     stage_1_rows, show_flow, show_step_memory
recompute.py     show_graph: what a block keeps, and what is made again
flash.py         show_tiles: the score matrix and FlashAttention's blocks
matrices.py      show_linear_pair, show_heads, show_vocabulary
regions.py       show_regions
tensor_block.py  show_f_and_g: a block on ranks; show_vocab_loss
sequence.py      show_cuts, show_half_block: hidden states cut by tokens, and what one rank holds
pipeline.py      show_schedule, show_schedules
pipeline_concepts.py  show_cut, show_messages, show_trace, show_halves, show_placements
pipeline_trace.py  show_measured
stages.py        show_live, show_peaks, show_stages_of_model
experts.py       show_load, show_balance, show_parameters
routing.py       show_routes, show_traffic
five_d.py        show_ranks
five_d_costs.py  show_pipeline_memory, show_costs
"""
