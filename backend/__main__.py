"""`python -m backend`: an installed Ratchet has no manage.py and starts child processes with this."""

from backend.console import main

if __name__ == "__main__":
    main()
