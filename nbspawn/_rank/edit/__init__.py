"""How a kept rank follows edits of the user's modules."""
