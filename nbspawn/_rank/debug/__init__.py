"""A rank that stops in a debugger, or asks the user."""
