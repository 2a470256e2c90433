"""`python -m aligner`: the command line, as the launcher starts its ranks."""

from aligner.cli import run

if __name__ == "__main__":
    run()
