#!/usr/bin/env python3
"""Stand-in for Modal's /__modal/.bin/modal-sandbox-fs-tools, a program that is not published: `fs_tools <json command>`.

Commands, as the SDK's modal/_utils/sandbox_fs_utils.py sends them: ReadFile, WriteFile, ListFiles, Stat, Remove,
MakeDirectory. An error is exit code 1 and one JSON object on standard error: error_kind, message, detail.
"""

import errno
import grp
import json
import os
import pwd
import shutil
import stat as st
import sys

MAX_READ = 5 * 1024**3
KINDS = {
    errno.ENOENT: ("NotFound", "No such file or directory"),
    errno.EISDIR: ("IsDirectory", "Is a directory"),
    errno.ENOTDIR: ("NotDirectory", "Not a directory"),
    errno.EACCES: ("PermissionDenied", "Permission denied"),
    errno.EPERM: ("PermissionDenied", "Permission denied"),
    errno.ENOTEMPTY: ("DirectoryNotEmpty", "Directory not empty"),
    errno.EEXIST: ("PathAlreadyExists", "Path already exists"),
    errno.EROFS: ("PermissionDenied", "Read-only file system"),
}


def info(path):
    s = os.lstat(path)
    kind = "symlink" if st.S_ISLNK(s.st_mode) else "directory" if st.S_ISDIR(s.st_mode) else "file"

    def name(f, i):
        try:
            return f(i)[0]
        except KeyError:
            return str(i)

    out = {
        "name": os.path.basename(path.rstrip("/")) or "/",
        "path": path,
        "type": kind,
        "size": s.st_size,
        "mode": st.S_IMODE(s.st_mode),
        "permissions": st.filemode(s.st_mode),
        "owner": name(pwd.getpwuid, s.st_uid),
        "group": name(grp.getgrgid, s.st_gid),
        "modified_time": s.st_mtime,
    }
    if kind == "symlink":
        out["symlink_target"] = os.readlink(path)
    return out


def read_file(path):
    with open(path, "rb") as f:
        if os.fstat(f.fileno()).st_size > MAX_READ:
            raise SystemExit(fail("FileTooLarge", "File too large"))
        shutil.copyfileobj(f, sys.stdout.buffer, 1 << 20)
    sys.stdout.buffer.flush()


def write_file(path):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as f:
        shutil.copyfileobj(sys.stdin.buffer, f, 1 << 20)


def remove(path, recursive=False):
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path) if recursive else os.rmdir(path)
    else:
        os.unlink(path)


def fail(kind, message, detail=""):
    sys.stderr.write(json.dumps({"error_kind": kind, "message": message, "detail": detail}))
    sys.stderr.flush()
    return 1


def main():
    op, a = next(iter(json.loads(sys.argv[1]).items()))
    path = a["path"]
    try:
        if op == "ReadFile":
            read_file(path)
        elif op == "WriteFile":
            write_file(path)
        elif op == "ListFiles":
            print(json.dumps([info(os.path.join(path, n)) for n in sorted(os.listdir(path))]))
        elif op == "Stat":
            print(json.dumps(info(path)))
        elif op == "Remove":
            remove(path, a.get("recursive", False))
        elif op == "MakeDirectory":
            os.makedirs(path, exist_ok=True) if a.get("parents") else os.mkdir(path)
        else:
            return fail("Unknown", f"unknown command {op}")
    except OSError as e:
        kind, message = KINDS.get(e.errno, ("Other", os.strerror(e.errno or 0)))
        return fail(kind, message, str(e))
    return 0


if __name__ == "__main__":
    sys.exit(main())
