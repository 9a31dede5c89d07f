"""Parts of the client side behind feedback/collector.py. Standard library only: it runs inside the observed app."""
