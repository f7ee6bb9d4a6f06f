"""What is known of a run, and what follows from it: pure, with the clock passed in."""
