"""What a Slurm cluster needs of the machine it runs on."""

from __future__ import annotations

import shutil

from tests.cluster import requirements

REQUIRE = "UNICRON_REQUIRE_SLURM"
"""Environment variable: with the value 1, a machine on which Slurm cannot run is a failure."""

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
"""Debian's packages slurm-wlm and munge have them."""

SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where the programs are looked for; daemons are not in every user's PATH."""


def missing() -> str:
    """Return what the machine lacks; empty if Slurm can run."""
    if absent := [name for name in PROGRAMS if shutil.which(name, path=SEARCH_PATH) is None]:
        return f"there is no {', '.join(absent)}"
    return requirements.missing()
