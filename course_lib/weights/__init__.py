"""Weights in files, and which boxes of them a rank holds.

tensor_files.py  tensors that stay in safetensors files until a piece is asked for
hf_weights.py    names, shapes and configs of the transformers library
loading.py       each rank reads its piece of the weights' files
base.py          the course's own trained model, which speaks English
pieces.py        what a rank holds, as boxes of full tensors: the form in which any layout reads another's
"""
