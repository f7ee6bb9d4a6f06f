"""What a rank has of the notebook: its variables, settings, loggers, magics, and changes to libraries."""
