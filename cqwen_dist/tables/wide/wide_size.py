"""The size of the wide part, for those who count without torch."""

from cqwen_dist.config.base_model import ModelConfig

FOLDS = 8
KINDS = 2  # of tables: location, log scale
NAMES = 128  # of numbers
BYTES = 3  # of a name's key


def wide_numbers(model: ModelConfig, vocab: int, hidden: int) -> int:
    """The number of parameters of a config's wide part on a base of these sizes (a test counts the real one)."""
    tables, (columns, features, depths) = KINDS * FOLDS, model.wide_size
    named = NAMES * (BYTES + 4 + 2 * tables) + features * (NAMES + 1 + tables)  # 4: centre and slope of phi and value
    layers = tables * (2 * depths * hidden + 1) if depths else 0
    return tables * columns + vocab + named + layers
