"""A function or a cell, and what it uses, on its way to the ranks, and values on their way back."""
