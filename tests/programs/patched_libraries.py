# %% in the notebook
"""A library's functions replaced, a module's settings and matplotlib's changed, before the ranks use them."""

import functools
import math
import os

import matplotlib.pyplot as plt
import numpy as np
import torch

plain_softmax = torch.nn.functional.softmax


def tempered(logits, dim=-1, _stacklevel=3, dtype=None):
    return plain_softmax(logits / temperature, dim=dim)


temperature = 2.0
torch.nn.functional.softmax = tempered
torch.Tensor.entropy = lambda self: -(self * self.log()).sum(-1)
np.mean = functools.partial(np.mean, dtype=np.float64)
math.tau = 6.0
plt.rcParams["figure.figsize"] = (3, 2)
np.seterr(divide="raise")

# %%
rank = int(os.environ["RANK"])
torch.manual_seed(31 + rank)
logits = torch.randn(4, 3)
probabilities = torch.nn.Softmax(dim=-1)(logits)
print(f"rank {rank} entropies {[round(e, 5) for e in probabilities.entropy().tolist()]}")
print(
    f"rank {rank} mean {np.mean(np.ones(3, np.float32)).dtype} tau {math.tau} {plt.figure().get_size_inches().tolist()}"
)

# %%
try:
    np.ones(1) / 0
except FloatingPointError:
    print(f"rank {rank} divides by zero, and is told")
