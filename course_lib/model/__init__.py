"""The models that are parallelised; they know nothing of ranks.

attention.py     the attention core, standard and fused
latent.py        multi-head latent attention: DeepSeek's queries, keys and values through narrow vectors
moe.py           a mixture of experts: router, dispatch, experts, combine, balancing
gpt.py           GPT-2, GPT-3 and the XLM-R encoder from the same blocks
llama.py         Llama, and `build` for all families
"""

from course_lib.model.attention import fused_attention, standard_attention
from course_lib.model.gpt import GPT, Encoder
from course_lib.model.llama import CLASSES, MLP, Llama, RMSNorm, build, initial_weights, rope_frequencies, rope_tables
from course_lib.model.moe import MoE, Routing, moe_layers, with_moe
