"""`aligner plan`: measures which role limits a run's step, and predicts the step time of other
device splits."""
