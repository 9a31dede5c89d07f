"""Live experiments: who answers for a unit, what was measured, what it says, and when it ends."""
