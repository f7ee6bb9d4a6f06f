"""The kernel's face: the magic, what it shows. Only here does kernel-side code import IPython or ipywidgets."""
