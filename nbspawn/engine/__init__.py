"""Places ranks on a machine, watches and ends them. Runs in the kernel, knows no IPython."""
