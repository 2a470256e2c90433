"""The Python API of `import aligner`, which provides the commands as functions."""
