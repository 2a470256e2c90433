"""Starting every role and ending it."""
