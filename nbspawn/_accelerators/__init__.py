"""One file for each kind of accelerator: all that nbspawn has to know of it, in the kernel and in ranks."""
