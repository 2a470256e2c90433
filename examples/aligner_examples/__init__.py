"""Small tasks that show aligner at work: sums, products with a calculator, a guessing game.

The experiments in `conf/` refer to them as `function:aligner_examples.arithmetic:prompts` or
`aligner_examples.calculator:Calculator`. aligner itself does not import this package.
"""
