"""Finding files, permissions, links, archives."""

from __future__ import annotations

from environments.terminal_tasks.checks import (
    Check,
    FileIs,
    GzipHolds,
    KindIs,
    LinesAre,
    LinkFollows,
    Missing,
    ModeIs,
    TarHolds,
)
from environments.terminal_tasks.draw import Draw, text
from environments.terminal_tasks.kinds.kind import kind
from environments.terminal_tasks.terminal_task import Plan


def forest(d: Draw, extension: str, count: int) -> list[str]:
    """Paths of new files, spread over folders and subfolders."""
    folders = [d.folder(), f"{d.folder()}/{d.folder()}", d.folder()]
    return [f"{folders[i % 3]}/{d.file(extension)}" for i in range(count)]


@kind("search", 1)
def find_by_extension(d: Draw) -> Plan:
    """find -name"""
    new, wanted, others = d.file(".txt"), forest(d, ".py", 4), forest(d, ".html", 3)
    files = {path: text(d.words(2)) for path in wanted + others}
    return Plan({"new": new}, (LinesAre(new, tuple(wanted)),), (f"find . -name '*.py' > {new}",), files)


@kind("search", 2)
def find_by_content(d: Draw) -> Plan:
    """grep -rl"""
    new, word, paths = d.file(".out"), d.word(), forest(d, ".txt", 7)
    files = {
        path: text([*d.sentences(2), *([f"here is {word}"] if i % 3 == 0 else [])]) for i, path in enumerate(paths)
    }
    wanted = tuple(path for path, body in files.items() if word in body)
    solution = (f"grep -rl {word} --include='*.txt' . > {new}",)
    return Plan({"new": new, "word": word}, (LinesAre(new, wanted),), solution, files)


@kind("search", 2)
def find_largest(d: Draw) -> Plan:
    """the biggest file of a folder"""
    folder, new = d.folder(), d.file(".out")
    sizes = d.numbers(6, 3, 60)
    files = {f"{folder}/{d.file('.bin')}": "x" * (size * 10) for size in sizes}
    largest = max(files, key=lambda path: len(files[path])).split("/")[1]
    solution = (f"ls -S {folder} | head -n 1 > {new}",)
    return Plan({"folder": folder, "new": new}, (FileIs(new, largest),), solution, files)


@kind("search", 2)
def delete_empty_files(d: Draw) -> Plan:
    """find -empty -delete"""
    paths = forest(d, ".txt", 7)
    files = {path: "" if i % 2 else text(d.words(2)) for i, path in enumerate(paths)}
    empty = tuple(path for path, body in files.items() if not body)
    return Plan({}, tuple(map(Missing, empty)), ("find . -type f -empty -delete",), files, may_change=empty)


@kind("search", 3)
def find_recent(d: Draw) -> Plan:
    """find -newermt"""
    folder, new = d.folder(), d.file(".out")
    names = [d.file(".txt") for _ in range(6)]
    years = d.shuffled([2015, 2017, 2018, 2021, 2022, 2023])
    files = {f"{folder}/{name}": text(d.words(2)) for name in names}
    commands = tuple(f"touch -d {year}-06-15 {path}" for path, year in zip(files, years, strict=True))
    wanted = tuple(path for path, year in zip(files, years, strict=True) if year > 2020)
    solution = (f"find {folder} -type f -newermt 2020-01-01 > {new}",)
    return Plan({"folder": folder, "new": new}, (LinesAre(new, wanted),), solution, files, commands)


@kind("search", 4, held_out=True)
def find_duplicates(d: Draw) -> Plan:
    """files with the same content as a given one"""
    new, paths = d.file(".out"), forest(d, ".txt", 8)
    body = text(d.sentences(3))
    files = {path: body if i in (0, 3, 5) else text(d.sentences(3)) for i, path in enumerate(paths)}
    twins = tuple(path for path in paths[1:] if files[path] == body)
    others = f"find . -name '*.txt' ! -path './{paths[0]}'"
    solution = (f"for f in $({others}); do cmp -s $f {paths[0]} && echo $f; done > {new}; true",)
    return Plan({"new": new, "old": paths[0]}, (LinesAre(new, twins),), solution, files)


@kind("permissions", 1)
def make_executable(d: Draw) -> Plan:
    """chmod +x"""
    script, other = d.file(".sh"), d.file(".sh")
    files = {script: "#!/bin/sh\necho hello\n", other: "#!/bin/sh\necho bye\n"}
    commands = (f"chmod 644 {script} {other}",)
    checks = (ModeIs(script, 0o100, 0o100), ModeIs(other, 0o644))
    return Plan({"script": script}, checks, (f"chmod +x {script}",), files, commands)


@kind("permissions", 1)
def set_mode(d: Draw) -> Plan:
    """chmod with an octal mode"""
    old, mode = d.file(), d.pick(("600", "640", "755", "444", "700", "664"))
    commands = (f"chmod 666 {old}",)
    return Plan(
        {"old": old, "mode": mode},
        (ModeIs(old, int(mode, 8)),),
        (f"chmod {mode} {old}",),
        {old: text(d.words(3))},
        commands,
    )


@kind("permissions", 3)
def modes_of_tree(d: Draw) -> Plan:
    """folders 755, files 644"""
    folder, inner = d.folder(), d.folder()
    paths = [f"{folder}/{d.file()}", f"{folder}/{inner}/{d.file()}", f"{folder}/{inner}/{d.file()}"]
    commands = (f"chmod -R 777 {folder}",)
    checks = (*(ModeIs(path, 0o644) for path in paths), ModeIs(folder, 0o755), ModeIs(f"{folder}/{inner}", 0o755))
    solution = (f"find {folder} -type d -exec chmod 755 {{}} + && find {folder} -type f -exec chmod 644 {{}} +",)
    return Plan({"folder": folder}, checks, solution, {path: text(d.words(2)) for path in paths}, commands)


@kind("permissions", 2, held_out=True)
def read_only(d: Draw) -> Plan:
    """nobody may write, the rest of the bits stay"""
    old, script = d.file(), d.file(".sh")
    commands = (f"chmod 664 {old}", f"chmod 775 {script}")
    checks = (ModeIs(old, 0o444), ModeIs(script, 0o555))
    solution = (f"chmod a-w {old} {script}",)
    return Plan(
        {"first": old, "second": script}, checks, solution, {old: text(d.words(2)), script: "echo hi\n"}, commands
    )


@kind("links", 1)
def symbolic_link(d: Draw) -> Plan:
    """ln -s"""
    old, new = d.file(), d.file()
    body = text(d.words(3))
    checks = (KindIs(old, "file"), LinkFollows(new, old))
    return Plan({"old": old, "new": new}, checks, (f"ln -s {old} {new}",), {old: body})


@kind("links", 2)
def move_link(d: Draw) -> Plan:
    """point an existing link somewhere else"""
    link, old, new, name = "current", d.folder(), d.folder(), d.file()
    files = {f"{old}/{name}": text(d.words(2)), f"{new}/{name}": text(d.words(2))}
    checks = (KindIs(link, "symlink"), FileIs(f"{link}/{name}", files[f"{new}/{name}"], exact=True))
    solution = (f"ln -sfn {new} {link}",)
    return Plan({"link": link, "old": old, "new": new}, checks, solution, files, (f"ln -s {old} {link}",))


@kind("links", 3, held_out=True)
def broken_links(d: Draw) -> Plan:
    """delete dangling symlinks only"""
    good, bad, files = (
        [d.file(".lnk") for _ in range(2)],
        [d.file(".lnk") for _ in range(3)],
        [d.file(".txt"), d.file(".txt")],
    )
    commands = (*(f"ln -s {t} {g}" for t, g in zip(files, good, strict=True)), *(f"ln -s missing-{b} {b}" for b in bad))
    checks: tuple[Check, ...] = (*(KindIs(g, "symlink") for g in good), *map(Missing, bad))
    solution = ("find . -xtype l -delete",)
    return Plan({}, checks, solution, {name: text(d.words(2)) for name in files}, commands)


@kind("archives", 1)
def pack_folder(d: Draw) -> Plan:
    """tar czf"""
    folder, new = d.folder(), d.file(".tar.gz")
    files = {f"{folder}/{d.file()}": text(d.words(3)) for _ in range(3)}
    checks = (TarHolds(new, tuple(files.items()), compressed=True),)
    return Plan({"folder": folder, "new": new}, checks, (f"tar czf {new} {folder}",), files)


@kind("archives", 1)
def unpack_archive(d: Draw) -> Plan:
    """tar xf into a folder"""
    archive, folder, inner = d.file(".tar.gz"), d.folder(), d.folder()
    files = {f"{inner}/{d.file()}": text(d.words(3)) for _ in range(3)}
    commands = (f"tar czf {archive} {inner} && rm -r {inner}",)
    unpacked = (FileIs(f"{folder}/{name}", body, exact=True) for name, body in files.items())
    checks: tuple[Check, ...] = (*unpacked, KindIs(archive, "file"))
    solution = (f"mkdir {folder} && tar xzf {archive} -C {folder}",)
    return Plan({"archive": archive, "folder": folder}, checks, solution, files, commands, may_change=tuple(files))


@kind("archives", 1)
def compress_file(d: Draw) -> Plan:
    """gzip -k"""
    old = d.file()
    body = text(d.sentences(10))
    return Plan({"old": old, "new": f"{old}.gz"}, (GzipHolds(f"{old}.gz", body),), (f"gzip -k {old}",), {old: body})


@kind("archives", 2)
def one_file_of_archive(d: Draw) -> Plan:
    """tar xf archive member"""
    archive, folder = d.file(".tar"), d.folder()
    files = {f"{folder}/{d.file()}": text(d.words(3)) for _ in range(4)}
    wanted, unwanted = next(iter(files)), list(files)[1:]
    commands = (f"tar cf {archive} {folder} && rm -r {folder}",)
    checks: tuple[Check, ...] = (FileIs(wanted, files[wanted], exact=True), *map(Missing, unwanted))
    return Plan(
        {"archive": archive, "wanted": wanted},
        checks,
        (f"tar xf {archive} {wanted}",),
        files,
        commands,
        may_change=tuple(files),
    )


@kind("archives", 3)
def pack_without(d: Draw) -> Plan:
    """tar --exclude"""
    folder, new = d.folder(), d.file(".tar")
    kept = {f"{folder}/{d.file('.txt')}": text(d.words(3)) for _ in range(3)}
    left = {f"{folder}/{d.file('.log')}": text(d.words(3)) for _ in range(2)}
    checks = (TarHolds(new, tuple(kept.items()), compressed=False),)
    return Plan({"folder": folder, "new": new}, checks, (f"tar cf {new} --exclude='*.log' {folder}",), {**kept, **left})


@kind("archives", 4, held_out=True)
def merge_archives(d: Draw) -> Plan:
    """two archives into one"""
    first, second, new = d.file(".tar"), d.file(".tar"), d.file(".tar.gz")
    one, two = {d.file(): text(d.words(3)) for _ in range(2)}, {d.file(): text(d.words(3)) for _ in range(2)}
    commands = (f"tar cf {first} {' '.join(one)} && tar cf {second} {' '.join(two)} && rm {' '.join([*one, *two])}",)
    together = " ".join([*one, *two])
    solution = (
        f"mkdir .m && tar xf {first} -C .m && tar xf {second} -C .m",
        f"tar czf {new} -C .m {together} && rm -r .m",
    )
    checks = (TarHolds(new, (*one.items(), *two.items()), compressed=True),)
    files = {**one, **two}
    return Plan(
        {"first": first, "second": second, "new": new}, checks, solution, files, commands, may_change=tuple(files)
    )
