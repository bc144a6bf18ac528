"""How large language models are trained on many GPUs: the package behind the notebooks.

A folder imports from its own floor and from the floors below it. Each folder's `__init__.py` is the map of its files.

0. Plain arithmetic, without torch
    config.py, shapes.py, tensors.py    models; those of people's files; which tensors one has, or a rank of tp
    hardware.py              GPUs and links with their sources
    engines.py               what differs between engines, as records: bytes that each keeps, what it hides
    flops.py, run.py         FLOPs of a token, a step, a stage; a model, its layout and its numbers in one record
    validate.py, span.py     refusals in one sentence; what a lane was busy with
    schedules/     pipeline schedules as lists: built, checked, clocked
    layout/        how a run lies on its ranks: mesh, sequence order, heads, layers, experts
    memory/        bytes that training holds
    traffic/, timing/        bytes that ranks send; seconds of a collective, of a step
    estimate/      how much, how fast, does it fit: estimate(run, cluster, engine)
    plan/          which layout to train with: all that divide, those that fit, the fastest
    claims/        claims that circulate, each recomputed, with a verdict
    panels/        controls by name, and pure functions from their values to an SVG and a sentence
    palette.py, units.py, float_formats.py, language.py    colours; units in words; FP32 to FP8; English or Korean
1. A world of ranks
    compat.py, devices.py    differences between torch versions; the device of this rank
    launch/        launch(fn, world_size, *args) -> what each rank returned
    comm/          collectives, process groups, operators with a gradient across ranks
    measure/       bytes on the wire and in memory, counted
2. The program being parallelised
    model/         Llama, GPT, experts, latent attention
    kernels/       programs for one GPU, in Triton's words, run and counted on any machine
    training/      the reference on one device: text, precision, offload, loop
3. In parallel
    minimal/                 the smallest whole program of a technique, which a lesson shows
    parallel/, native/       engines from scratch; as PyTorch ships it
4. What a run leaves, and runs without hardware
    weights/       weights in files, and which boxes of them a rank holds
    checkpoint/    an engine's state saved under one layout and loaded under any other
    simulate/      one rank of thousands, in one process
    compare/       lessons' programs beside one process; predicted beside measured
    train/         the trainer
    labs/          what to run on a real cluster for a chapter, and what was measured there
    cluster/       a site before a long job: what it is like, and whether its nodes and links are well
5. What people see and learn with
    plots/, widgets/         pictures from plain records; panels in a notebook, a run that is watched
    checks/        graders of the exercises, a folder a chapter
    authoring/     notebooks as source code
    cli/, web/     the command `course`; a page that computes in the browser
"""

from course_lib.language import speak_errors

speak_errors()
