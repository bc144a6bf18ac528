"""How large language models are trained on many GPUs: the package behind the notebooks."""
