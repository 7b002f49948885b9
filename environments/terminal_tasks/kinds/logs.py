"""Logs, configuration files, encodings and patches."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter

from environments.terminal_tasks.checks import EntriesAre, FileIs, LinesAre, NumberIs
from environments.terminal_tasks.draw import Draw, text
from environments.terminal_tasks.kinds.kind import kind
from environments.terminal_tasks.terminal_task import Plan


def access_log(d: Draw, rows: int) -> list[tuple[str, str, str, int]]:
    """Requests as (time, address, path, status), in order of time; the first address is the busiest."""
    addresses = [f"10.{d.number(0, 99)}.{d.number(0, 99)}.{i}" for i in range(1, 5)]
    weighted = [addresses[0]] * (rows // 2 + 1) + [addresses[1 + i % 3] for i in range(rows)]
    times = sorted(d.numbers(rows, 0, 86399))
    return [
        (
            f"{t // 3600:02d}:{t // 60 % 60:02d}:{t % 60:02d}",
            d.pick(weighted),
            f"/{d.pick(('a', 'b', 'index', '404'))}",
            d.pick((200, 200, 301, 404, 500)),
        )
        for t in times
    ]


def as_log(rows: list[tuple[str, str, str, int]]) -> str:
    """One line per request."""
    return text([f"{time} {address} GET {path} {status}" for time, address, path, status in rows])


@kind("logs", 1)
def log_errors(d: Draw) -> Plan:
    """lines of one level"""
    old, new = d.file(".log"), d.file(".txt")
    levels = d.shuffled(["ERROR"] * 3 + ["INFO"] * 5 + ["WARN"] * 3)
    lines = [
        f"2026-03-{i + 10} {level} {words}"
        for i, (level, words) in enumerate(zip(levels, d.sentences(11, 3), strict=True))
    ]
    wanted = text([line for line, level in zip(lines, levels, strict=True) if level == "ERROR"])
    return Plan({"old": old, "new": new}, (FileIs(new, wanted),), (f"grep ERROR {old} > {new}",), {old: text(lines)})


@kind("logs", 2)
def log_count_status(d: Draw) -> Plan:
    """the status is the last field; 404 is also a path"""
    old, new, rows = d.file(".log"), d.file(".txt"), access_log(d, 40)
    rows.append(("23:59:59", "10.0.0.9", "/404", 404))
    count = sum(status == 404 for *_, status in rows)
    solution = (f"grep -c ' 404$' {old} > {new}",)
    return Plan({"old": old, "new": new}, (NumberIs(new, count),), solution, {old: as_log(rows)})


@kind("logs", 3)
def log_top_address(d: Draw) -> Plan:
    """who asked most"""
    old, new, rows = d.file(".log"), d.file(".txt"), access_log(d, 30)
    busiest = rows[0][1]
    rows += [("23:59:59", busiest, "/b", 200)] * 20
    address = Counter(row[1] for row in rows).most_common(1)[0][0]
    solution = (f"awk '{{print $2}}' {old} | sort | uniq -c | sort -nr | head -n 1 | awk '{{print $2}}' > {new}",)
    return Plan({"old": old, "new": new}, (FileIs(new, address),), solution, {old: as_log(rows)})


@kind("logs", 3)
def log_time_range(d: Draw) -> Plan:
    """string comparison of times"""
    old, new, rows = d.file(".log"), d.file(".txt"), access_log(d, 60)
    start = d.number(6, 11)
    first, last = f"{start:02d}:30:00", f"{start + 6:02d}:15:00"
    wanted = as_log([row for row in rows if first <= row[0] <= last])
    solution = (f'awk \'$1 >= "{first}" && $1 <= "{last}"\' {old} > {new}',)
    return Plan(
        {"old": old, "new": new, "first": first, "last": last}, (FileIs(new, wanted),), solution, {old: as_log(rows)}
    )


@kind("logs", 3, held_out=True)
def rotate_log(d: Draw) -> Plan:
    """app.log -> app.log.1 -> app.log.2"""
    folder, log = d.folder(), d.file(".log")
    names = [log, f"{log}.1", f"{log}.2"]
    bodies = [text(d.sentences(3)) for _ in names]
    files = {f"{folder}/{name}": body for name, body in zip(names, bodies, strict=True)}
    checks = (
        EntriesAre(folder, tuple(names)),
        FileIs(f"{folder}/{log}", "", exact=True),
        FileIs(f"{folder}/{log}.1", bodies[0], exact=True),
        FileIs(f"{folder}/{log}.2", bodies[1], exact=True),
    )
    solution = (f"cd {folder} && mv {log}.1 {log}.2 && mv {log} {log}.1 && : > {log}",)
    return Plan({"folder": folder, "log": log}, checks, solution, files, may_change=tuple(files))


@kind("config", 1)
def add_setting(d: Draw) -> Plan:
    """KEY=value at the end of an env file"""
    old, key, value = d.file(".env"), d.word().upper(), d.word()
    body = text([f"{d.word().upper()}={d.word()}" for _ in range(3)])
    checks = (FileIs(old, f"{body}{key}={value}\n"),)
    asks = {"old": old, "key": key, "value": value}
    return Plan(asks, checks, (f"echo {key}={value} >> {old}",), {old: body}, may_change=(old,))


@kind("config", 2)
def ini_value(d: Draw) -> Plan:
    """the same key stands in two sections"""
    old, sections = d.file(".ini"), d.words(3)
    ports = d.numbers(4, 1000, 9999)
    target, after = sections[1], ports[3]

    def body(values: list[int]) -> str:
        return "\n".join(f"[{s}]\nport = {p}\nhost = {s}.example\n" for s, p in zip(sections, values, strict=True))

    checks = (FileIs(old, body([ports[0], after, ports[2]])),)
    solution = (f"sed -i '/^\\[{target}\\]/,/^port/s/^port = .*/port = {after}/' {old}",)
    asks = {"old": old, "section": target, "after": after}
    return Plan(asks, checks, solution, {old: body(ports[:3])}, may_change=(old,))


@kind("config", 2)
def comment_out(d: Draw) -> Plan:
    """put # before one line"""
    old, keys = d.file(".conf"), d.words(5)
    lines = [f"{key} {d.number(1, 99)}" for key in keys]
    wanted = text([f"#{line}" if i == 2 else line for i, line in enumerate(lines)])
    solution = (f"sed -i 's/^{keys[2]} /#&/' {old}",)
    return Plan({"old": old, "key": keys[2]}, (FileIs(old, wanted),), solution, {old: text(lines)}, may_change=(old,))


@kind("config", 3, held_out=True)
def sort_settings(d: Draw) -> Plan:
    """drop comments, sort keys"""
    old, new, keys = d.file(".conf"), d.file(".conf"), d.words(6)
    settings = [f"{key}={d.number(1, 99)}" for key in keys]
    lines = [row for setting in settings for row in (f"# about {setting.split('=')[0]}", setting)]
    solution = (f"grep -v '^#' {old} | sort > {new}",)
    return Plan({"old": old, "new": new}, (FileIs(new, text(sorted(settings))),), solution, {old: text(lines)})


@kind("encoding", 1)
def checksum(d: Draw) -> Plan:
    """sha256sum"""
    old, new = d.file(), d.file(".sha")
    body = text(d.sentences(3))
    digest = hashlib.sha256(body.encode()).hexdigest()
    checks = (FileIs(new, digest),)
    return Plan({"old": old, "new": new}, checks, (f"sha256sum {old} | cut -d' ' -f1 > {new}",), {old: body})


@kind("encoding", 1)
def decode_base64(d: Draw) -> Plan:
    """base64 -d"""
    old, new = d.file(".b64"), d.file(".txt")
    body = text(d.sentences(3))
    encoded = base64.b64encode(body.encode()).decode() + "\n"
    return Plan(
        {"old": old, "new": new}, (FileIs(new, body, exact=True),), (f"base64 -d {old} > {new}",), {old: encoded}
    )


@kind("encoding", 3)
def damaged_files(d: Draw) -> Plan:
    """sha256sum -c"""
    folder, new = d.folder(), d.file(".out")
    names = [d.file(".dat") for _ in range(6)]
    bodies = [text(d.sentences(2)) for _ in names]
    bad = d.sample(range(6), 2)
    sums = text(
        [f"{hashlib.sha256(body.encode()).hexdigest()}  {name}" for name, body in zip(names, bodies, strict=True)]
    )
    files = {f"{folder}/{n}": (b + "x" if i in bad else b) for i, (n, b) in enumerate(zip(names, bodies, strict=True))}
    solution = (f"(cd {folder} && sha256sum -c SHA256SUMS 2>/dev/null | grep FAILED | cut -d: -f1) > {new}",)
    checks = (LinesAre(new, tuple(names[i] for i in bad)),)
    return Plan({"folder": folder, "new": new}, checks, solution, {**files, f"{folder}/SHA256SUMS": sums})


@kind("encoding", 2, held_out=True)
def hex_dump(d: Draw) -> Plan:
    """od or xxd, plain hex"""
    old, new = d.file(".bin"), d.file(".hex")
    body = " ".join(d.words(2))
    solution = (f"od -An -v -tx1 {old} | tr -d ' \\n' > {new}",)
    return Plan({"old": old, "new": new}, (FileIs(new, body.encode().hex()),), solution, {old: body})


@kind("patches", 2)
def apply_patch(d: Draw) -> Plan:
    """patch, or an edit by hand"""
    old, change = d.file(".txt"), d.file(".diff")
    lines = d.sentences(7)
    fixed = [*lines[:3], " ".join(d.words(4)), *lines[4:]]
    context = [f" {line}" for line in lines[:3]]
    after = [f" {line}" for line in lines[4:]]
    diff = text([f"--- a/{old}", f"+++ b/{old}", "@@ -1,7 +1,7 @@", *context, f"-{lines[3]}", f"+{fixed[3]}", *after])
    checks = (FileIs(old, text(fixed)),)
    solution = (f"git apply {change}",)
    return Plan({"old": old, "change": change}, checks, solution, {old: text(lines), change: diff}, may_change=(old,))


@kind("patches", 2)
def changed_lines(d: Draw) -> Plan:
    """diff"""
    first, second, new, lines = d.file(), d.file(), d.file(".out"), d.sentences(9)
    added = [" ".join(d.words(3)) for _ in range(2)]
    later = [*lines[:2], added[0], *lines[2:6], added[1], *lines[6:]]
    solution = (f"diff {first} {second} | sed -n 's/^> //p' > {new}",)
    asks = {"first": first, "second": second, "new": new}
    return Plan(asks, (FileIs(new, text(added)),), solution, {first: text(lines), second: text(later)})
