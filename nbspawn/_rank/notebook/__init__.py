"""What a rank has of the notebook: its variables, and libraries that the notebook has used."""
