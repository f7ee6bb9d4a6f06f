# %% in the notebook
"""Variables that only strings name: pandas' queries and eval, a template, string annotations."""

import os

import pandas as pd

frame = pd.DataFrame({"loss": [0.9, 0.5, 0.3, 0.2], "step": [1, 2, 3, 4]})
limit, scale = 0.4, 10
title = "at most {limit} (times {scale})"

# %%
rank = int(os.environ["RANK"])
few = frame.query("loss < @limit and step > @rank")
print(f"rank {rank} {few.step.tolist()} {title.format_map(globals())}")

# %%
print(f"rank {rank} {eval('limit * scale + rank')} {globals()['scale']} {frame.eval('loss * @scale').max()}")
