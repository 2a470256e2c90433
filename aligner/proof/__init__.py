"""`aligner prove`: compare a model's implementation with transformers, on a small random model.

- `shrink`: a small config.json with every quirk of a model's config.json.
- `reference`: the results of transformers for a random model of this configuration.
- `rank_jobs`: the results of trainer and engine, computed on the ranks of a layout.
- `gloo_worlds`: the processes of these ranks.
- `comparison`: errors of the results, and the parameters that cause them (`localization`).
- `run_proof`: the whole proof of a model at one or more layouts.
"""
