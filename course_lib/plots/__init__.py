"""Pictures by form: a chapter's picture is data that it gives to a form; each `show_...` ends in `plt.show()`.

What a picture draws is computed by a function beside it, and tested. A picture that no cell computes is a file of svg/.

concepts.py      show_concept: the drawn pictures of svg/, which are their own source
style.py         sizes, fonts, units, legends, arrows; nothing outside a picture is changed
tiles.py         form: rows of tiles, of what ranks hold. show_squares
timeline.py      form: lanes over time. show_overlap, show_step_times
memory.py        form: stacked bars and areas of bytes. show_memory_timeline, show_step_memory, show_budgets
curves.py        form: curves beside points. show_bandwidth, show_alpha_beta, show_curves
live.py          LiveCurve, drawn again while training goes on
course_map.py    show_course: which chapter builds on which; the README's pictures, written into docs/
collectives.py   show_collectives, show_ring_all_reduce
precision.py     show_magnitudes, show_codes, show_blocks
ladder.py        show_ladder
comparison.py    show_comparison: predicted beside measured, with the error
data_parallel.py  show_replicas, show_buckets, show_flow
context.py       show_work, show_documents, show_mask, show_heads_for_tokens, show_memory_by_length
pipeline.py      show_schedule, show_schedules, show_messages, show_trace, show_measured, show_live, show_tradeoff,
                 show_stages_of_model
experts.py       show_load, show_balance, show_parameters, show_rows_per_expert, show_traffic
holdings.py      which share of each part of a model the ranks of a layout hold
five_d_costs.py  show_pipeline_memory, show_costs; show_block: every collective of a block; step_spans: blocks in time
choosing.py      show_options, show_front, show_by_memory, show_waiting, show_losses, show_predicted, show_scaling,
                 show_checkpoint_interval
cheat_sheet.py   docs/cheat_sheet.svg and .pdf: one page of bytes, FLOPs, messages, bubbles, scales
run_log.py       show_run: loss, speed, memory and seconds of a run's ranks, from its logs
rank_traces.py   show_rank_traces: one step on every rank, side by side
"""
