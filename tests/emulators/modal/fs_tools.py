#!/usr/bin/env python3
"""Stand-in for Modal's /__modal/.bin/modal-sandbox-fs-tools, which is not published: `modal-sandbox-fs-tools <json>`.

Commands, as the SDK's modal/_utils/sandbox_fs_utils.py sends them: ReadFile, WriteFile, ListFiles, Stat, Remove,
MakeDirectory. An error is exit code 1 and one JSON object on standard error: error_kind, message, detail.
"""

import errno
import grp
import json
import os
import pwd
import shutil
import stat
import sys

CHUNK_BYTES = 1 << 20
KINDS = {
    errno.ENOENT: "NotFound",
    errno.EISDIR: "IsDirectory",
    errno.ENOTDIR: "NotDirectory",
    errno.EACCES: "PermissionDenied",
    errno.EPERM: "PermissionDenied",
    errno.EROFS: "PermissionDenied",
    errno.ENOTEMPTY: "DirectoryNotEmpty",
    errno.EEXIST: "PathAlreadyExists",
}


def describe(path):
    found = os.lstat(path)
    link = stat.S_ISLNK(found.st_mode)
    described = {
        "name": os.path.basename(path.rstrip("/")) or "/",
        "path": path,
        "type": "symlink" if link else "directory" if stat.S_ISDIR(found.st_mode) else "file",
        "size": found.st_size,
        "mode": stat.S_IMODE(found.st_mode),
        "permissions": stat.filemode(found.st_mode),
        "owner": name_of(pwd.getpwuid, found.st_uid),
        "group": name_of(grp.getgrgid, found.st_gid),
        "modified_time": found.st_mtime,
    }
    return {**described, "symlink_target": os.readlink(path)} if link else described


def name_of(lookup, number):
    try:
        return lookup(number)[0]
    except KeyError:
        return str(number)


def read_file(path):
    with open(path, "rb") as file:
        shutil.copyfileobj(file, sys.stdout.buffer, CHUNK_BYTES)
    sys.stdout.buffer.flush()


def write_file(path):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file, CHUNK_BYTES)


def list_files(path):
    print(json.dumps([describe(os.path.join(path, name)) for name in sorted(os.listdir(path))]))


def remove(path, recursive=False):
    if not os.path.isdir(path) or os.path.islink(path):
        os.unlink(path)
    elif recursive:
        shutil.rmtree(path)
    else:
        os.rmdir(path)


def make_directory(path, parents=False):
    if parents:
        os.makedirs(path, exist_ok=True)
    else:
        os.mkdir(path)


COMMANDS = {
    "ReadFile": read_file,
    "WriteFile": write_file,
    "ListFiles": list_files,
    "Stat": lambda path: print(json.dumps(describe(path))),
    "Remove": remove,
    "MakeDirectory": make_directory,
}


def fail(kind, message, detail=""):
    sys.stderr.write(json.dumps({"error_kind": kind, "message": message, "detail": detail}))
    return 1


def main():
    ((command, arguments),) = json.loads(sys.argv[1]).items()
    if command not in COMMANDS:
        return fail("Unknown", f"unknown command {command}")
    try:
        COMMANDS[command](**arguments)
    except OSError as problem:
        return fail(KINDS.get(problem.errno, "Other"), os.strerror(problem.errno or 0), str(problem))
    return 0


if __name__ == "__main__":
    sys.exit(main())
