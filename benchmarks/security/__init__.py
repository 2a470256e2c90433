"""Attack aligner with the techniques of a security campaign, and report what succeeds.

`python -m benchmarks.security` runs all probes; see `benchmarks.security.__main__`.
"""
