"""`aligner plan`: measure which role limits a run, and predict other device splits.

The predictions are step times of the same run on other numbers of devices.
"""
