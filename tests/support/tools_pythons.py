"""Other Pythons of this machine, wherever they were installed."""

import shutil
import subprocess
from pathlib import Path


def find_python(version):
    """Path of a Python of this minor version that starts, or None."""
    home = Path.home()
    places = [*home.glob(f".pyenv/versions/{version}.*/bin"), *home.glob(f".local/share/uv/python/*-{version}.*/bin")]
    for candidate in (*(place / f"python{version}" for place in places), shutil.which(f"python{version}")):
        if (
            candidate
            and Path(candidate).exists()
            and not subprocess.run([candidate, "-V"], capture_output=True).returncode
        ):
            return str(candidate)
    return None
