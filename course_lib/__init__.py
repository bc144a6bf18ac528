"""How large language models are trained on many GPUs: the package behind the notebooks, in reading order.

A file imports from its own part and from the parts above it, never from one below; tests/test_layers.py reads this map.

1. A world of N ranks
    validate.py            nonsense refused where it enters: sizes, numbers, words and records, in one sentence
    devices.py             one device rule: a rank's GPU where there is one for each rank, else the CPU
    launch.py              launch(fn, world_size, *args) -> what each rank returned; time limits, errors with their rank
    _rank.py               inside one rank: prepare the process, call the function, report
    _processes.py          where ranks come from: a fork server, or spawn on Windows
    _fork_server.py        the process that ranks are forked from
    _watch.py              the notebook's side of a launch: listen until all are done, one failed, or time is up
    _failures.py           from what ranks reported to one readable error
    _accelerate.py         accelerate.notebook_launcher behind the same call
    _slurm.py              the same launch as a Slurm job: hand it in, wait, listen, cancel
    _slurm_node.py         what each task of that job does: be a rank's host, and the rank
    _file_link.py          messages through files that all nodes see
    rendezvous.py          who am I, by what torchrun, accelerate or srun set, and the world joined
    mesh.py                the mesh pp x dp x cp x tp: rank <-> coordinates, and the groups of each axis
    comm.py                the collectives as the course uses them, and a ring written by hand
    meter.py               bytes on the wire, by collective and by axis
    conjugate.py           what crosses between ranks forward, and the gradient backward, in pairs
    compat.py              every difference between torch versions
2. The program being parallelised (it knows nothing of ranks)
    config.py              ModelConfig, and presets with the exact shapes of published models
    attention.py           the attention core, explicit and fused
    flash.py               FlashAttention's idea in PyTorch: attention block by block
    moe.py                 a mixture of experts: router, dispatch, experts, combine, balancing
    latent.py              multi-head latent attention: DeepSeek's queries, keys and values through narrow vectors
    model.py               Llama: RMSNorm, RoPE, grouped-query attention, SwiGLU
    gpt.py                 GPT-2, GPT-3 and the XLM-R encoder from the same blocks
    lora.py                frozen weights and thin trained products beside them
    offload.py             activations that wait on the host for backward
    precision.py           number formats, and AdamW with FP32 masters
    data.py                real text, offline, one token a byte; each dp rank's share
    training.py            the single-process reference: loss, accumulation, recomputation, steps
    moe_training.py        experts beside a dense model of equal FLOPs: load, drops, loss on text not seen
    hf_weights.py          weights to and from the transformers library
    tensor_files.py        tensors that stay in safetensors files until a piece is asked for
3. Arithmetic
    hardware.py            GPUs and links: every number with its unit and source
    timing.py              bytes and seconds of collectives, FLOPs of a step, MFU and HFU
    memory/__init__.py     memory of training, predicted and measured
    memory/states.py       parameters, gradients, optimizer states, by precision recipe
    memory/activations.py  activations of the course's own models, term by term
    memory/papers.py       activations as the papers count them
    memory/formulas.py     the whole budget before running
    memory/zero.py         ZeRO's units, what a rank holds of each kind, offload
    memory/tensor.py       tensor and sequence parallelism as a narrower model
    memory/context.py      context parallelism: fewer tokens of each sequence, and others' keys for a moment
    memory/moe.py          a mixture of experts: total and active parameters, memory by EP x DP x TP
    memory/sharded.py      the whole budget of one rank among many
    memory/stages.py       a model cut into pipeline stages: layers, parameters, balance with embedding and head
    memory/pipeline.py     how many micro-batches a rank of a pipeline keeps, and its whole budget
    memory/five_d.py       the memory of each rank of a pipeline under a whole layout
    memory/timeline.py     bytes alive over time, by kind: the tracker's record
    memory/storages.py     what the tracker must know of storages and operators
    memory/tracker.py      tensors alive, by kind, over time
    memory/cuda.py         what a GPU holds besides tensors
    memory/profile.py      predicted beside measured
    placement.py           whose tokens are where under context parallelism, and who computes what of the mask
    context_work.py        how much of the mask each rank computes at each step of a ring, and its share of the ideal
    expert_layout.py       which rank has which experts of a layer, and which sizes are possible
    sharded_timing.py      modelled time of ZeRO, tensor and sequence parallelism, and what hides it
    context_timing.py      modelled time of a ring, of gathered keys, of exchanged heads, and what hides it
    instructions.py        what a pipeline schedule is made of, and what each piece of it needs
    schedules.py           the schedules: 1F1B, interleaved, Zero Bubble, DualPipeV, and simpler ones
    bubbles.py             closed forms of schedules: what is waited, what is kept, and when they hold
    schedule_check.py      whether a schedule can run: what is wrong, where, what would be right
    simulator.py           a clock for schedules: who waits, and what is kept meanwhile
    layout_check.py        what a layout cannot be, why, and the nearest that can
    layout.py              how a training run lies on its ranks: sizes and choices, checked when made
    run.py                 a training run as one record: model, layout, recipe, device; every formula takes it
    traffic/__init__.py    which bytes: every collective of one training step
    traffic/collectives.py  bytes of one collective, and of a list of calls
    traffic/odds.py        rows of tokens that choose experts uniformly, in closed form
    traffic/routing.py     rows and bytes of experts, from rank to rank, within and between nodes
    traffic/data.py        gradients, and parameters with ZeRO
    traffic/tensor.py      sums of tensor and sequence parallelism
    traffic/context.py     keys and values over context-parallel ranks
    traffic/pipeline.py    boundaries between stages, and a tied weight
    traffic/experts.py     rows to experts, expected or of real choices
    traffic/step.py        every collective of one step, by axis
    pipeline_timing.py     seconds of stages and transfers for the simulator, and published scaling beside the bubble
    five_d_timing.py       modelled seconds of a whole layout's step, and what they are spent on
4. One file per parallelism; the same names in both folders
    parallel/__init__.py   from scratch
    parallel/data.py       data parallel: naive, overlapped, bucketed
    parallel/shards.py     flat padded parameters in shards, the units of stage 3, AdamW on shards
    parallel/zero.py       ZeRO: optimizer, gradients, parameters sharded
    parallel/offload_states.py  optimizer states that wait on the host or on disk
    parallel/linear.py     column and row linear: a matrix cut over ranks, and what enters and leaves it
    parallel/vocabulary.py embedding and loss with the vocabulary cut over ranks
    parallel/tensor.py     tensor parallel: a Llama or GPT cut in one call, its step, whole gradients
    parallel/sequence.py   sequence parallel: norms, dropout and residual, each rank for its own tokens
    parallel/dispatch.py   tokens to the ranks of their experts and back: uneven all-to-alls with gradients
    parallel/expert_tensor.py  experts whose matrices are cut over tp as well
    parallel/expert.py     expert parallel: experts spread over ranks, gradients summed over the right ones
    parallel/loading.py    each rank reads its piece of the weights' files
    parallel/tiles.py      attention over blocks of other ranks: kernels of a tile, parts merged
    parallel/ring.py       ring attention: keys and values travel, their gradients travel home
    parallel/gathered.py   the same by all-gather and reduce-scatter
    parallel/merge_error.py  what 16-bit sums cost a ring: its error by ranks and dtype
    parallel/ulysses.py    context parallel by heads: all-to-all, alone or inside a ring
    parallel/context.py    context parallel: a Llama or GPT whose sequences are cut in one call, its step
    parallel/stages.py     a model cut into stages of consecutive layers
    parallel/channels.py   pipeline: who sends what to whom, and why nobody waits for ever
    parallel/deferred.py   backward in two parts: weight gradients that wait
    parallel/executor.py   does a rank's list of a pipeline schedule, one instruction after the other
    parallel/pipeline.py   pipeline parallel: any schedule in one call, its step, whole gradients
    parallel/pieces.py     what a rank holds, as boxes of whole tensors: the form in which any layout reads another's
    parallel/sums.py       whose gradients are summed over whom, when all parallelisms meet
    parallel/five_d.py     all five at once: a layout applied by calling the files above
    parallel/whole.py      whole tensors from all ranks of a layout
    native/__init__.py     as PyTorch ships it
    native/data.py         DistributedDataParallel, and Accelerate on top
    native/zero.py         FSDP2, ZeroRedundancyOptimizer, and Accelerate on top
    native/deepspeed_zero.py DeepSpeed's ZeRO, stages 0 to 3, where it is installed
    native/tensor.py       DTensor: a plan for parallelize_module, loss_parallel
    native/sequence.py     the same plan, with the stream in pieces along the sequence
    native/context.py      ring attention: PyTorch's template on a CPU, context_parallel on a GPU
    native/pipeline.py     torch.distributed.pipelining: six schedules behind the same step
    native/expert.py       all_to_all_single_autograd, grouped_mm, and DDP for the rest
5. Time and clusters without hardware
    synthetic_routing.py   tokens that choose experts at random
    checkpoint_files.py    folders of checkpoints: complete or not there, and found to be whole
    checkpoint_pieces.py   pieces to files through torch.distributed.checkpoint; no code is run from a file
    checkpoint_optimizer.py  what a checkpoint has of an optimizer: moments, masters, counts of steps, learning rates
    checkpoint.py          an engine's state saved under one layout and loaded under any other, while training goes on
    checkpoint_export.py   checkpoints to the files of transformers, and an engine from them
    export.py              the choices of a run as configs of Accelerate and DeepSpeed
    sharded_profile.py     a toy on real ranks: bytes held and sent beside the formulas
    five_d_profile.py      a layout on real ranks: bytes held and sent beside the formulas
    fake_world.py          a world of any size in one process: fake ranks, fake tensors, whole numbers that stay real
    tape.py                of many micro-batches few run, the rest is noted from a tape: bytes, messages, FLOPs
    fake_cluster.py        one rank of thousands simulated: peak by kind, bytes by axis, FLOPs, for any stage
6. What people see
    plots/__init__.py      pictures from plain records
    plots/palette.py       one colour for one kind of memory and one mesh axis
    plots/style.py         sizes, fonts, units
    plots/memory.py        memory over time, and budgets against GPUs
    plots/comparison.py    predicted beside measured, with the error
    plots/formats.py       number formats as rows of bits
    plots/mesh.py          the same ranks grouped along each axis
    plots/collectives.py   where values are, step by step
    plots/timeline.py      compute and communication side by side
    plots/curves.py        a model as a line, what was measured and published as points
    plots/ladder.py        one measure after another, and what each gains
    plots/sharding.py      who holds what under ZeRO: pieces, flat shards, units whole for a moment
    plots/matrices.py      matrices cut by column and row, heads by rank, a vocabulary by rows
    plots/regions.py       a block as a strip of regions: what is cut where, and what crosses borders
    plots/context.py       the mask shared out by rank, who waits at each step, blocks that travel, memory by length
    plots/pipeline.py      pipeline schedules as charts: who computes which micro-batch when, and who idles
    plots/pipeline_trace.py  what ranks did, laid over the simulated chart
    plots/pipeline_tradeoff.py bubble against memory, a point for each schedule
    plots/stages.py        which layers where, and how many micro-batches each rank keeps alive
    plots/experts.py       the load of experts, what balancing does, total and active parameters
    plots/routing.py       tokens on their way to experts, and who sends what to whom
    plots/holdings.py      which share of each part of a model the ranks of a layout hold
    plots/five_d.py        ranks on nodes, and whom each talks to
    plots/five_d_costs.py  memory along the pipeline, bytes by axis, seconds by part, a pipeline against ZeRO-3
    widgets/__init__.py    sliders on the same pictures
    widgets/parts.py       the pieces that every explorer is made of
    widgets/collectives.py message, ranks, link, and the time they take
    widgets/memory.py      a model, how it is trained, and the GPUs that hold it
    widgets/precision.py   what a format makes of a weight and of an update
    widgets/data_parallel.py batch, step time, and communication left uncovered
    widgets/zero.py        stages, offload and precision: what a GPU holds and sends
    widgets/tensor.py      tp, SP and links: memory, and the share of communication
    widgets/context.py     sequence, cp and placement: memory, and one layer's attention by each method
    widgets/pipeline.py    schedule, ranks, micro-batches, times: the chart, its bubble, what is kept alive
    widgets/pipeline_puzzle.py place the blocks of a pipeline by hand; a checker answers
    widgets/experts.py     experts, skew and nodes: load, drops, bytes within and between nodes
    widgets/five_d.py      a whole layout: who holds what, memory, bytes by axis, modelled step; a toy measured
7. For learners, and for those who maintain the course
    checks/__init__.py     the graders of the exercises, a file a chapter
    checks/core.py         fresh numbers, real ranks, named misconceptions
    checks/observe.py      an answer at work on real ranks: what it returned, sent and received
    checks/ranks.py        graders of chapter 00
    checks/alpha_beta.py   graders of chapter 00: its arithmetic
    checks/single_gpu_memory.py  graders of chapter 01
    checks/fitting.py      graders of chapter 01: what fits into a memory
    checks/data_parallel.py graders of chapter 03: sizes, averages, buckets
    checks/dp_hooks.py     graders of chapter 03: hooks, accumulation under DDP
    checks/zero.py         graders of chapter 04: shards, stage 1, bytes held and sent
    checks/zero_units.py   graders of chapter 04: gather, use, free
    checks/techniques.py   graders of chapter 02: gradients, kept bytes, calls
    checks/rungs.py        graders of chapter 02: its arithmetic
    checks/tensor_parallel.py graders of chapter 05: heads, share of communication, a row layer
    checks/tp_gradients.py graders of chapter 05: a conjugate pair, a column backward, a loss from pieces
    checks/sequence_parallel.py graders of chapter 06: shapes of regions, bytes kept, the cheapest way that fits
    checks/sp_gradients.py graders of chapter 06: gather_in backward, the forgotten sum, half a block
    checks/context_parallel.py graders of chapter 07: positions, merge of a softmax, a step's tile, bytes
    checks/cp_ranks.py     graders of chapter 07: loss of a shard, tokens for heads
    checks/pipeline_formulas.py graders of chapter 08: shares of a bubble, layers kept, layers for each stage
    checks/pipeline_schedules.py graders of chapter 08: 1F1B as lists, a shorter schedule
    checks/pipeline_ranks.py graders of chapter 08: backward in two halves, messages both ways
    checks/routing.py      graders of chapter 09: router, dispatch, combine, capacity, balance
    checks/expert_parallel.py graders of chapter 09: bytes of a layer, whose gradients are summed
    checks/five_d.py       graders of chapter 10: groups, whose gradient, a pipeline or ZeRO-3, what fits
    checks/five_d_ranks.py graders of chapter 10: a combination mended, the length of a gradient
    authoring/__init__.py  notebooks as source code
    authoring/form.py      the one form in which a notebook is stored
    authoring/mirrors.py   cells held to the package
    authoring/exercises.py exercises from solutions
    authoring/rules.py     what a notebook must satisfy
    authoring/readme.py    the map that you are reading, copied into the README
    authoring/__main__.py  fmt, mirrors, exercises, check, badges
    train_plan.py          what a training run is asked to do: steps, learning rate, random numbers, checkpoints
    train_options.py       the trainer's command line as records
    train_log.py           a run's log: JSON lines that can be read whenever the run was killed
    train_stop.py          asked to stop by a signal: all ranks after the same step, and the exit code says so
    train.py               the trainer: under torchrun, accelerate, srun, or in a launch; from its last checkpoint
    demo.py                one table: one process against 2 and 4 ranks
    bench.py               from scratch against PyTorch's own, in one run
    simulate_cli.py        course simulate: a layout of any size, stage by stage, against a GPU's memory
    cli.py                 course doctor, run, demo, bench, simulate
    __main__.py            python -m course_lib
"""
