"""Measurements of the package, run from the repository root. They import cqwen_dist; it never imports them."""
