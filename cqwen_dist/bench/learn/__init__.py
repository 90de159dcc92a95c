"""``cqwen bench learn``: a real base, fine-tuned on the user's texts in our way and in the ordinary one."""
