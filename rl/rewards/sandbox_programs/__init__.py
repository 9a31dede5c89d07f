"""Programs that run inside the sandbox: the process that answers calls with a model's code, and the one that tests it.

Standard library only: `server` loads these files by path in an interpreter that knows nothing of this project.
"""
