"""Files and folders: create, copy, move, rename, delete."""

from __future__ import annotations

from environments.terminal_tasks.checks import Check, EntriesAre, FileIs, KindIs, Missing
from environments.terminal_tasks.draw import Draw, text
from environments.terminal_tasks.kinds.kind import kind
from environments.terminal_tasks.terminal_task import Plan


@kind("files", 0)
def make_folder(d: Draw) -> Plan:
    """mkdir"""
    folder, other = d.folder(), d.file()
    return Plan({"folder": folder}, (KindIs(folder, "dir"),), (f"mkdir {folder}",), {other: text(d.words(2))})


@kind("files", 0)
def empty_file(d: Draw) -> Plan:
    """touch"""
    new, other = d.file(), d.file()
    return Plan({"new": new}, (FileIs(new, "", exact=True),), (f"touch {new}",), {other: text(d.words(2))})


@kind("files", 0)
def write_text(d: Draw) -> Plan:
    """echo into a file"""
    new, words = d.file(), " ".join(d.words(2))
    return Plan({"new": new, "text": words}, (FileIs(new, words),), (f"echo {words} > {new}",))


@kind("files", 0)
def copy_file(d: Draw) -> Plan:
    """cp"""
    old, new = d.file(), d.file()
    body = text(d.words(4))
    return Plan({"old": old, "new": new}, (FileIs(new, body, exact=True),), (f"cp {old} {new}",), {old: body})


@kind("files", 0)
def rename_file(d: Draw) -> Plan:
    """mv"""
    old, new, other = d.file(), d.file(), d.file()
    body = text(d.words(4))
    checks = (Missing(old), FileIs(new, body, exact=True))
    return Plan(
        {"old": old, "new": new}, checks, (f"mv {old} {new}",), {old: body, other: text(d.words(2))}, may_change=(old,)
    )


@kind("files", 0)
def delete_file(d: Draw) -> Plan:
    """rm"""
    old, other, third = d.file(), d.file(), d.file()
    files = {name: text(d.words(2)) for name in (old, other, third)}
    return Plan({"old": old}, (Missing(old),), (f"rm {old}",), files, may_change=(old,))


@kind("files", 0)
def append_line(d: Draw) -> Plan:
    """echo >>"""
    old, words = d.file(), " ".join(d.words(2))
    body = text(d.words(3))
    checks = (FileIs(old, body + words),)
    return Plan({"old": old, "text": words}, checks, (f"echo {words} >> {old}",), {old: body}, may_change=(old,))


@kind("files", 0, held_out=True)
def into_folder(d: Draw) -> Plan:
    """mv into a folder that is there"""
    folder, old, other = d.folder(), d.file(), d.file()
    body = text(d.words(3))
    checks = (Missing(old), FileIs(f"{folder}/{old}", body, exact=True))
    files = {old: body, f"{folder}/{other}": text(d.words(2))}
    return Plan({"old": old, "folder": folder}, checks, (f"mv {old} {folder}",), files, may_change=(old,))


@kind("files", 0, held_out=True)
def delete_two_files(d: Draw) -> Plan:
    """rm with two names"""
    first, second, other = d.file(), d.file(), d.file()
    files = {name: text(d.words(2)) for name in (first, second, other)}
    checks = (Missing(first), Missing(second))
    solution = (f"rm {first} {second}",)
    return Plan({"first": first, "second": second}, checks, solution, files, may_change=(first, second))


@kind("files", 1)
def nested_folders(d: Draw) -> Plan:
    """mkdir -p with a file at the end"""
    path = "/".join([d.folder(), d.folder(), d.folder()])
    new, words = d.file(), " ".join(d.words(3))
    checks = (FileIs(f"{path}/{new}", words),)
    return Plan({"path": path, "new": new, "text": words}, checks, (f"mkdir -p {path} && echo {words} > {path}/{new}",))


@kind("files", 1)
def move_into_folder(d: Draw) -> Plan:
    """mv into a new folder"""
    folder, first, second, stays = d.folder(), d.file(), d.file(), d.file()
    files = {name: text(d.words(3)) for name in (first, second, stays)}
    moved = [
        check
        for name in (first, second)
        for check in (Missing(name), FileIs(f"{folder}/{name}", files[name], exact=True))
    ]
    asks = {"folder": folder, "first": first, "second": second}
    return Plan(
        asks, tuple(moved), (f"mkdir {folder} && mv {first} {second} {folder}/",), files, may_change=(first, second)
    )


@kind("files", 1)
def copy_folder(d: Draw) -> Plan:
    """cp -r"""
    old, new, inner = d.folder(), d.folder(), d.folder()
    names = [d.file(), f"{inner}/{d.file()}", f"{inner}/{d.file()}"]
    files = {f"{old}/{name}": text(d.words(3)) for name in names}
    checks = tuple(FileIs(f"{new}/{name}", files[f"{old}/{name}"], exact=True) for name in names)
    return Plan({"old": old, "new": new}, checks, (f"cp -r {old} {new}",), files)


@kind("files", 1)
def delete_by_extension(d: Draw) -> Plan:
    """rm *.ext, in this folder only"""
    folder = d.folder()
    gone, kept = [d.file(".tmp") for _ in range(3)], [d.file(".txt"), d.file(".md"), f"{folder}/{d.file('.tmp')}"]
    files = {name: text(d.words(2)) for name in gone + kept}
    return Plan({"extension": ".tmp"}, tuple(map(Missing, gone)), ("rm *.tmp",), files, may_change=tuple(gone))


@kind("files", 2)
def change_extension(d: Draw) -> Plan:
    """rename a family of files"""
    old, new = d.sample((".txt", ".text", ".md", ".log", ".bak"), 2)
    stems = [d.file(" ").strip() for _ in range(4)]
    files = {f"{stem}{old}": text(d.words(2)) for stem in stems}
    other = d.file(".csv")
    checks = [
        check for stem in stems for check in (Missing(stem + old), FileIs(stem + new, files[stem + old], exact=True))
    ]
    solution = (f'for f in *{old}; do mv "$f" "${{f%{old}}}{new}"; done',)
    changed = tuple(files)
    return Plan({"old": old, "new": new}, tuple(checks), solution, {**files, other: "a,b\n"}, may_change=changed)


@kind("files", 2)
def spaces_in_names(d: Draw) -> Plan:
    """names with blanks must be quoted"""
    names = [f"{d.word()} {d.word()} {d.word()}.txt" for _ in range(3)]
    files = {name: text(d.words(2)) for name in names}
    plain = d.file(".txt")
    checks = [c for name in names for c in (Missing(name), FileIs(name.replace(" ", "_"), files[name], exact=True))]
    solution = ('for f in *" "*; do mv "$f" "${f// /_}"; done',)
    return Plan({}, tuple(checks), solution, {**files, plain: text(d.words(2))}, may_change=tuple(names))


@kind("files", 3)
def sort_into_folders(d: Draw) -> Plan:
    """one folder per extension"""
    extensions = d.sample(("txt", "md", "csv", "log", "json", "html"), 3)
    files = {d.file(f".{ext}"): text(d.words(2)) for ext in extensions for _ in range(2)}
    folder = d.folder()
    checks = [
        c
        for name, body in files.items()
        for c in (Missing(f"{folder}/{name}"), FileIs(f"{folder}/{name.split('.')[1]}/{name}", body, exact=True))
    ]
    solution = (f'cd {folder} && for f in *.*; do mkdir -p "${{f##*.}}" && mv "$f" "${{f##*.}}/"; done',)
    laid_out = {f"{folder}/{name}": body for name, body in files.items()}
    return Plan({"folder": folder}, tuple(checks), solution, laid_out, may_change=tuple(laid_out))


@kind("files", 3)
def number_files(d: Draw) -> Plan:
    """rename in alphabetical order to 01, 02, ..."""
    folder, ext = d.folder(), d.pick((".jpg", ".wav", ".pdf"))
    names = sorted(d.word() + ext for _ in range(5))
    files = {f"{folder}/{name}": text(d.words(2)) for name in names}
    renamed = {f"{i:02d}{ext}": files[f"{folder}/{name}"] for i, name in enumerate(names, 1)}
    checks: tuple[Check, ...] = (
        EntriesAre(folder, tuple(renamed)),
        *(FileIs(f"{folder}/{n}", body, exact=True) for n, body in renamed.items()),
    )
    solution = (f'cd {folder} && i=1; for f in *{ext}; do mv "$f" "$(printf %02d $i){ext}"; i=$((i+1)); done',)
    return Plan({"folder": folder, "extension": ext}, checks, solution, files, may_change=tuple(files))


@kind("files", 2, held_out=True)
def swap_files(d: Draw) -> Plan:
    """exchange two files"""
    first, second = d.file(), d.file()
    one, two = text(d.words(3)), text(d.words(3))
    checks = (FileIs(first, two, exact=True), FileIs(second, one, exact=True))
    solution = (f"mv {first} .swap && mv {second} {first} && mv .swap {second}",)
    return Plan(
        {"first": first, "second": second}, checks, solution, {first: one, second: two}, may_change=(first, second)
    )


@kind("files", 3, held_out=True)
def mirror_folders(d: Draw) -> Plan:
    """copy the folders without the files"""
    old, new = d.folder(), d.folder()
    folders = [d.folder(), f"{d.folder()}/{d.folder()}", d.folder()]
    files = {f"{old}/{folder}/{d.file()}": text(d.words(2)) for folder in folders}
    checks = [EntriesAre(f"{new}/{folder}", ()) for folder in folders]
    solution = (f'cd {old} && find . -type d -exec mkdir -p "../{new}/{{}}" ";"',)
    return Plan({"old": old, "new": new}, tuple(checks), solution, files)
