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
rank_traces.py   show_rank_traces: one step on every rank, side by side
stages.py        show_live, show_peaks, show_stages_of_model
experts.py       show_load, show_balance, show_parameters
expert_concepts.py  show_dense_and_experts, show_expert_kinds, show_sorted_rows, show_rows_per_expert
expert_ranks.py  show_travelling_rows, show_gradient_path, show_owners: experts on ranks
routing.py       show_routes, show_traffic
choosing.py      show_steps, show_cuts, show_paths, show_options, show_front, show_predicted, show_scaling
run_log.py       show_run: loss, speed, memory and seconds of a run's ranks, from its logs
failures.py      show_checkpoint_interval: training, saving and lost work by the interval
hosts.py         show_two_hosts: what crosses a thin link, by layout
five_d.py        show_ranks
five_d_costs.py  show_pipeline_memory, show_costs
layout_choice.py show_ladder, show_losses, show_options, show_waiting
"""
