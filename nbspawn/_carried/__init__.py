"""What the notebook has set, read in the kernel and put into force in ranks: settings, loggers, attributes of modules,
magics, arguments. Each module has both halves, so that they agree."""
