"""Programs that run inside the sandbox: one answers calls with a model's code, one runs its tests.

Standard library only: `server` loads these files by path in an interpreter without this project.
"""
