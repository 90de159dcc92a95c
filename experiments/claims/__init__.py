"""The seeds' claims, tried on a real base: `python -m experiments`. docs/experiments.md has the results."""
