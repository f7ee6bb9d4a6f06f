"""torchrun's script: ``torchrun torchrun_work.py FUNCTION ARGUMENTS``."""

import ast
import sys

import work

if __name__ == "__main__":
    work.ranked(getattr(work, sys.argv[1]), *map(ast.literal_eval, sys.argv[2:]))
