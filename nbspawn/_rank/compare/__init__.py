"""A rank's part in a comparison of values over ranks."""
