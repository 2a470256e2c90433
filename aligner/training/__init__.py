"""The training loops of online, offline and preference runs, and their set-up."""
