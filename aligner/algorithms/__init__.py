"""The algorithms: pure functions, and one page per trainer."""
