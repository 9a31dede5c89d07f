"""`python -m backend`: how an installed Ratchet starts its child processes, which have no manage.py."""

from backend.console import main

if __name__ == "__main__":
    main()
