"""Fails unless the executed quickstart says that it reached more than 95 % test accuracy."""

import json
import re
import sys
from pathlib import Path

LEAST = 95.0  # percent

cells = json.loads(Path(sys.argv[1]).read_text())["cells"]
printed = "".join("".join(output.get("text", ())) for cell in cells for output in cell.get("outputs", ()))
found = re.search(r"test accuracy: ([\d.]+) %", printed)
if found is None:
    sys.exit("the quickstart printed no test accuracy")
print(found[0])
if float(found[1]) <= LEAST:
    sys.exit(f"that is not more than {LEAST} %")
