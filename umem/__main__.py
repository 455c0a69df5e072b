"""`python -m umem`."""

from umem.cli import main

if __name__ == "__main__":
    main()
