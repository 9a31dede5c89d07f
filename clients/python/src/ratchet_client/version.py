"""Version of the client package; the server has none of its own and takes every version."""

__version__ = "1.0.0"
