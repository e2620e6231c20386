"""``python -m seqloom``: the same as the ``seqloom`` command."""

from seqloom.cli import main

if __name__ == "__main__":
    main()
