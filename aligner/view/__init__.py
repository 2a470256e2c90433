"""Web pages of one or several runs: `aligner view` serves them live, and `aligner report` writes
the page of a run to one file."""
