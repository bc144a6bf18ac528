"""Predicted beside measured, and from scratch beside PyTorch's own.

profile.py          memory of a step on one device
sharded_profile.py  a toy on real ranks under ZeRO or tensor parallelism: bytes held and sent
five_d_profile.py   any layout on real ranks: bytes held and sent
step_traces.py      one step of every rank as Chrome traces
gpu_timings.py      what each chapter models, timed on the GPUs of this machine
techniques.py       what each technique splits, holds and sends: the table of the index
bench.py            seconds of a step, from scratch and as PyTorch ships it
"""
