"""A rank among others: its environment, its device, its process groups."""
