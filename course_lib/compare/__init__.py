"""Predicted beside measured, and from scratch beside PyTorch's own.

record.py           a lesson's program on real ranks, beside one process: the record of each rank
trials.py           the kinds of such programs: what each is given, and what is right
one_gpu.py          a pass, a short training and a peak on one device
profile.py          memory of a step on one device
five_d_profile.py   any layout on real ranks: bytes held and sent
step_traces.py      one step of every rank as Chrome traces
two_hosts.py        which axis may cross a thin link: steps measured on two emulated hosts, bytes by formula beside
bench.py            seconds of a step, from scratch and as PyTorch ships it
"""
