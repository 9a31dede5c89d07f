"""Figures drawn as SVG on the server: no script and no chart library in a page."""
