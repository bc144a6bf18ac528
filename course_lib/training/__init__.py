"""Training on one device: the reference that every parallelism is compared with.

data.py          real text, offline, one token a byte; each dp rank's share
tokenizer.py     byte-pair encoding
text.py          English: what a model says, how well it knows a text, texts to fine-tune on
precision.py     number formats, and AdamW with FP32 master weights
offload.py       activations that wait on the host for backward
loop.py          loss, accumulation, recomputation, steps
chunked_loss.py  the loss in chunks of tokens, without a tensor of all logits
moe_training.py  experts beside a dense model of equal FLOPs: load, drops, loss on text not seen
"""

from course_lib.training.chunked_loss import chunked_loss_of
from course_lib.training.loop import TrainConfig, accumulate_gradients, loss_of, make_optimizer, train_step, wait_for
from course_lib.training.offload import offload_activations
from course_lib.training.precision import LossScaler, MasterAdamW, Precision, precision_named
