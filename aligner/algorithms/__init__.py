"""The algorithms: pure functions of tensors, and their compositions."""
