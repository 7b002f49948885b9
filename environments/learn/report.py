from pathlib import Path


def write_report(folder: Path, path: Path) -> None:
    """"""
