"""`python -m cqwen_dist` is `cqwen`."""

from cqwen_dist.cli import main

if __name__ == "__main__":
    main()
