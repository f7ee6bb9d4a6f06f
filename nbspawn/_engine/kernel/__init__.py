"""What the kernel holds for all runs: its directories, descriptors, signals, its guardian."""
