"""A run, or many, as pages of a browser: served live by `aligner view`, and kept in one file by
`aligner report`."""
