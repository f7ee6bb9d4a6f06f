"""The version that was installed. A module of its own: importlib.metadata is imported only when it is asked for."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("nbspawn")
except PackageNotFoundError:  # a checkout on sys.path
    __version__ = "0+unknown"
