"""Tests that need a release of a package newer than the oldest that is allowed."""

import pytest
import transformers
from packaging import version

# On Python 3.10 pip finds nothing newer than 5.20.
transformers_5_24 = pytest.mark.skipif(
    version.parse(transformers.__version__) < version.parse("5.24"),
    reason=f"transformers {transformers.__version__}, older than 5.24",
)
