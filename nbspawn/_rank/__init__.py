"""What runs in the rank: its entry point and the context managers that make a bare process a rank."""
