"""Places ranks on a machine, watches and ends them. Runs in the kernel and in agents, knows no IPython."""

import logging

# Silent by default: https://docs.python.org/3/howto/logging.html#configuring-logging-for-a-library
logging.getLogger("nbspawn").addHandler(logging.NullHandler())
