"""Entry point of `python -m aligner`, with which the launcher starts the ranks."""

from aligner.cli import run

if __name__ == "__main__":
    run()
