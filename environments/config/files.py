"""Finding configs by name: in a checkout they stand in configs/, in an installed wheel inside this package."""

from __future__ import annotations

from pathlib import Path

from environments.config.errors import ConfigError, did_you_mean

_PACKAGE = Path(__file__).resolve().parents[1]


def config_root() -> Path:
    """Folder of the shipped configs."""
    installed = _PACKAGE / "configs"
    return installed if installed.is_dir() else _PACKAGE.parent / "configs"


def config_names() -> list[str]:
    """Names of all shipped configs, as the CLI takes them: `terminal_tasks`, `nomad/dev`, ..."""
    root = config_root()
    return sorted(str(path.relative_to(root).with_suffix("")) for path in root.rglob("*.yaml"))


def find_config(name: str | Path) -> Path:
    """The file meant by a path or by the name of a shipped config."""
    path = Path(name)
    if path.is_file():
        return path
    stem = str(name).removesuffix(".yaml").removesuffix(".yml")
    shipped = config_root() / f"{stem}.yaml"
    if shipped.is_file():
        return shipped
    if path.is_dir():
        raise ConfigError(f"{path} is a folder, not a config file")
    raise ConfigError(f"no config file {str(name)!r} and no shipped config of that name; {_hint(stem)}")


def _hint(stem: str) -> str:
    names = config_names()
    return did_you_mean(stem, names) if names else "no configs are shipped yet"
