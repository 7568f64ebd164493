"""``python -m gradveil.cli`` is the same as ``gradveil``."""

from gradveil.cli import main

if __name__ == "__main__":
    main()
