"""Makes ``python -m reclaim`` the command line, as torchrun starts it."""

from reclaim.cli import main

if __name__ == "__main__":
    main()
