"""`python3 tree_facts.py ROOT`: one JSON line of all that can be told apart in a tree. Runs alone, in any namespace."""

import hashlib
import json
import os
import stat
import sys

OURS = ("dev", "proc", "sys", "etc/hosts", "etc/resolv.conf", ".hermes-rl")


def facts(path, info):
    """Kind, mode, owner, link target or content, attributes."""
    kind = stat.S_IFMT(info.st_mode)
    found = [oct(info.st_mode), info.st_uid, info.st_gid]
    if kind == stat.S_IFLNK:
        found.append(os.fsencode(os.readlink(path)).hex())
    elif kind == stat.S_IFREG:
        with open(path, "rb") as file:
            found += [info.st_size, hashlib.sha256(file.read()).hexdigest()]
    elif kind in (stat.S_IFCHR, stat.S_IFBLK):
        found.append(info.st_rdev)
    try:
        names = sorted(os.listxattr(path, follow_symlinks=False))
        found.append([[name, os.getxattr(path, name, follow_symlinks=False).hex()] for name in names])
    except OSError:
        found.append([])
    return found


def walk(root, path=b"", links=None):
    """Everything below, by the hex of its path; files that are one file name the first of its paths."""
    tree = {} if path else {"": facts(root, os.lstat(root))}
    links = {} if links is None else links
    for name in sorted(os.listdir(os.path.join(root, path))):
        inside = os.path.join(path, name)
        if os.fsdecode(inside) in OURS:
            continue
        info = os.lstat(os.path.join(root, inside))
        tree[inside.hex()] = facts(os.path.join(root, inside), info)
        if stat.S_ISDIR(info.st_mode):
            tree.update(walk(root, inside, links))
        else:
            tree[inside.hex()] += [links.setdefault((info.st_dev, info.st_ino), inside.hex()), info.st_mtime_ns]
    return tree


if __name__ == "__main__":
    print(json.dumps(walk(os.fsencode(sys.argv[1]) + b"/")))
