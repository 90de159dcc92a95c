"""What users run to measure: ``cqwen bench``."""
