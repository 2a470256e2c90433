"""A configuration composed, saved, resumed, built on others, and made small for a dry run."""
