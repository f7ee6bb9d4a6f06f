"""A run as a whole, in the kernel: when to stop ranks, whose question is put, what is shown, what is raised."""
