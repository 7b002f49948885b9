"""YAML into plain data, with the line of every key: a message about a setting can say where it stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from environments.errors import ConfigError
from sandbox_pool.errors import did_you_mean

_PACKAGE = Path(__file__).resolve().parents[1]


def config_root() -> Path:
    """Folder of the shipped configs."""
    installed = _PACKAGE / "configs"
    return installed if installed.is_dir() else _PACKAGE.parent / "configs"


def config_names() -> list[str]:
    """Names of all shipped configs, as the CLI takes them: `terminal_tasks`, `nomad/dev`, ..."""
    root = config_root()
    return sorted(str(path.relative_to(root).with_suffix("")) for path in root.rglob("*.yaml"))


def harbor_path(source: str | Path | None) -> str:
    """PATH of `harbor:PATH`, which stands for the shipped config of that name with these tasks; empty for others."""
    kind, _, path = str(source).partition(":")
    return path if kind == "harbor" else ""


def find_config(name: str | Path) -> Path:
    """The file meant by a path or by the name of a shipped config."""
    path = Path(name)
    if harbor_path(name):
        name = "harbor"
    if path.is_file():
        return path
    stem = str(name).removesuffix(".yaml").removesuffix(".yml")
    shipped = config_root() / f"{stem}.yaml"
    if shipped.is_file():
        return shipped
    if str(name) and path.is_dir():
        raise ConfigError(f"{path} is a folder, not a config file")
    raise ConfigError(f"no config file {str(name)!r} and no shipped config of that name; {_hint(stem)}")


def _hint(stem: str) -> str:
    names = config_names()
    return did_you_mean(stem, names) if names else "no configs are shipped yet"


KeyPath = tuple[str | int, ...]


@dataclass
class YamlFile:
    """Content of one file and where each part of it stands."""

    path: Path
    data: dict[str, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)

    def where(self, key_path: KeyPath) -> str:
        """`file:line` of a key, or of its nearest parent that is written in the file."""
        for length in range(len(key_path), 0, -1):
            if line := self.lines.get(key_path[:length]):
                return f"{self.path}:{line}"
        return str(self.path)


def read_yaml(path: Path) -> YamlFile:
    """Read a config file; syntax errors, duplicate keys and anything but a mapping at the top are refused."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return YamlFile(path, {})
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{path}:{root.start_mark.line + 1}: a config is a mapping of keys to values")
        file = YamlFile(path, {})
        file.data = _mapping(loader, root, (), file)
        return file
    except yaml.YAMLError as error:
        raise ConfigError(_syntax_message(path, error)) from error
    finally:
        loader.dispose()


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode, at: KeyPath, file: YamlFile) -> dict[str, Any]:
    own_keys = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
    _refuse_duplicates(own_keys, file)
    loader.flatten_mapping(node)  # `<<: *anchor`: merged keys come first, so own keys win
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node)
        line = key_node.start_mark.line + 1
        if not isinstance(key, str):
            raise ConfigError(f"{file.path}:{line}: the key {key!r} must be text; put it in quotes")
        file.lines[(*at, key)] = line
        result[key] = _value(loader, value_node, (*at, key), file)
    return result


def _refuse_duplicates(keys: list[yaml.Node], file: YamlFile) -> None:
    seen: dict[str, int] = {}
    for key in keys:
        line = key.start_mark.line + 1
        if key.value in seen:
            raise ConfigError(f"{file.path}:{line}: {key.value!r} is set twice, first in line {seen[key.value]}")
        seen[key.value] = line


def _value(loader: yaml.SafeLoader, node: yaml.Node, at: KeyPath, file: YamlFile) -> Any:
    if isinstance(node, yaml.MappingNode):
        return _mapping(loader, node, at, file)
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            file.lines[(*at, index)] = item.start_mark.line + 1
        return [_value(loader, item, (*at, index), file) for index, item in enumerate(node.value)]
    return loader.construct_object(node)


def _syntax_message(path: Path, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"{path}:{mark.line + 1}" if mark else str(path)
    return f"{where}: not valid YAML: {getattr(error, 'problem', None) or error}"
