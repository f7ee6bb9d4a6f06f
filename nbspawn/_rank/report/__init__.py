"""What a rank tells of itself: where it is, what it uses, what it has called, how its command ended."""
