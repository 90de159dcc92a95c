"""What each rank would make for itself and keep; the fork server imports this."""

import os

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from cqwen_dist.data.numbers import find_numbers

get_checkpoint_conversion_mapping("qwen2")  # patterns for every model that transformers renames: a third of a second
find_numbers("1 234")
os.fsync = lambda _: None  # what a killed process wrote stays all the same: no test cuts the power
