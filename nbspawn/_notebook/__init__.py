"""The kernel's user interface: magics and views. Only here does kernel-side code import IPython or ipywidgets."""
