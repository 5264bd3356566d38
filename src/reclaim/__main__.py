"""Entry point of ``python -m reclaim``, which torchrun starts."""

from reclaim.cli.app import main

if __name__ == "__main__":
    main()
