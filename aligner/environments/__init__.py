"""Environments that answer a model turn by turn, written by the user, in processes of their own."""
