"""What the kernel, the fork server and ranks each do with their own process: a debugger on it, imports, thread pools,
files that are open, memory."""
