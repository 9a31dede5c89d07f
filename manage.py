#!/usr/bin/env python
"""Django's command line, in a checkout; `ratchet` is the same one where the project was installed by pip."""

from backend.__main__ import main

if __name__ == "__main__":
    main()
