"""Transfer: imports and exports in the formats of other programs, their batches, undo and pages."""
