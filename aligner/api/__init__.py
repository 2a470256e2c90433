"""What `import aligner` gives: the commands, as functions of Python."""
