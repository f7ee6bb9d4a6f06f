"""The process on each node of a run over several machines: runs the local engine there, for the kernel."""
