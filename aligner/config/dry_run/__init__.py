"""A configuration's dry run: its roles and layouts with a tiny model, on one machine's CPU, before a cluster is asked for.

`layouts` makes layouts smaller whose ranks are too many, `shapes` the models, `settings` all that follows from these; `plan`
puts them together and says what was changed. All of it is configuration in, configuration out: nothing here runs.
"""
