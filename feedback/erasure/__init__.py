"""Erasure of a unit from every place, and withdrawal of decisions."""
