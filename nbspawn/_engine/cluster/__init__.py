"""Ranks on several machines, as one engine: agents, their nodes, the connections to them."""
