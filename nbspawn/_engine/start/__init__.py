"""How ranks are started: the start method, the fork server, what it imports."""
