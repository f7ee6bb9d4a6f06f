# %% in the notebook
"""Logging that the notebook has set up, for a library's logger and the root's."""

import logging
import os

import torch

logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s: %(message)s", force=True)
log = logging.getLogger("training")


# %%
rank = int(os.environ["RANK"])
another = logging.getLogger("another.library")
torch.manual_seed(25 + rank)
for step in range(2):
    log.info("rank %d step %d loss %r", rank, step, torch.rand(8).mean().item())
log.debug("rank %d is not heard", rank)
logging.info("rank %d says so to all", rank)

# %%
log.info("rank %d goes on", rank)
another.warning("rank %d warns", rank)
