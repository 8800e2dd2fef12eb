"""The clouds whose notices are known. The verb needs their names before it needs anything else."""

from __future__ import annotations

from enum import StrEnum


class Provider(StrEnum):
    """Who runs the machine."""

    AWS = "aws"
    GOOGLE = "google"
    AZURE = "azure"
