"""CSV and JSON with the tools every shell has."""

from __future__ import annotations

import json

from environments.terminal_tasks.checks import FileIs, JsonIs, JsonLinesAre, LinesAre, NumberIs
from environments.terminal_tasks.draw import Draw, text
from environments.terminal_tasks.kinds.kind import kind
from environments.terminal_tasks.terminal_task import Plan

HEADER = "name,city,amount"


def people(d: Draw, rows: int) -> list[tuple[str, str, int]]:
    """Rows of a small table: name, city (three different ones), amount."""
    cities = [d.city() for _ in range(3)]
    amounts = d.numbers(rows, 5, 990)
    return [(d.person(), cities[i % 3], amount) for i, amount in enumerate(amounts)]


def as_csv(rows: list[tuple[str, str, int]]) -> str:
    """The rows under a header line."""
    return text([HEADER, *(f"{name},{city},{amount}" for name, city, amount in rows)])


@kind("csv", 2)
def csv_column(d: Draw) -> Plan:
    """cut -d, without the header"""
    old, new, rows = d.file(".csv"), d.file(".txt"), people(d, 8)
    column, name = d.pick([(1, "name"), (2, "city"), (3, "amount")])
    wanted = text([row[column - 1] for row in rows])
    solution = (f"tail -n +2 {old} | cut -d, -f{column} > {new}",)
    return Plan({"old": old, "new": new, "column": name}, (FileIs(new, wanted),), solution, {old: as_csv(rows)})


@kind("csv", 2)
def csv_filter(d: Draw) -> Plan:
    """rows of one city, with the header"""
    old, new, rows = d.file(".csv"), d.file(".csv"), people(d, 10)
    city = rows[0][1]
    wanted = as_csv([row for row in rows if row[1] == city])
    solution = (f"awk -F, 'NR == 1 || $2 == \"{city}\"' {old} > {new}",)
    return Plan({"old": old, "new": new, "city": city}, (FileIs(new, wanted),), solution, {old: as_csv(rows)})


@kind("csv", 2)
def csv_sort(d: Draw) -> Plan:
    """sort by a number, the header stays on top"""
    old, new, rows = d.file(".csv"), d.file(".csv"), people(d, 9)
    wanted = as_csv(sorted(rows, key=lambda row: row[2]))
    solution = (f"(head -n 1 {old}; tail -n +2 {old} | sort -t, -k3,3n) > {new}",)
    return Plan({"old": old, "new": new}, (FileIs(new, wanted),), solution, {old: as_csv(rows)})


@kind("csv", 3)
def csv_group_sum(d: Draw) -> Plan:
    """sum per group"""
    old, new, rows = d.file(".csv"), d.file(".txt"), people(d, 12)
    totals = {city: sum(row[2] for row in rows if row[1] == city) for city in sorted({row[1] for row in rows})}
    solution = (f"tail -n +2 {old} | awk -F, '{{s[$2] += $3}} END {{for (c in s) print c, s[c]}}' | sort > {new}",)
    wanted = text([f"{city} {total}" for city, total in totals.items()])
    return Plan({"old": old, "new": new}, (FileIs(new, wanted),), solution, {old: as_csv(rows)})


@kind("csv", 2)
def csv_to_tsv(d: Draw) -> Plan:
    """another separator"""
    old, new, rows = d.file(".csv"), d.file(".tsv"), people(d, 6)
    wanted = as_csv(rows).replace(",", "\t")
    return Plan(
        {"old": old, "new": new}, (FileIs(new, wanted),), (f"tr ',' '\\t' < {old} > {new}",), {old: as_csv(rows)}
    )


@kind("csv", 4, held_out=True)
def csv_join(d: Draw) -> Plan:
    """join two tables by key, whatever their order"""
    first, second, new = d.file(".csv"), d.file(".csv"), d.file(".csv")
    names = [d.person() for _ in range(7)]
    city = {name: d.city() for name in names}
    amount = dict(zip(names, d.numbers(7, 10, 900), strict=True))
    only = d.person()
    files = {
        first: text([f"{name},{city[name]}" for name in d.shuffled(names)]),
        second: text([f"{name},{amount[name]}" for name in d.shuffled(names)] + [f"{only},5"]),
    }
    wanted = text([f"{name},{city[name]},{amount[name]}" for name in sorted(names)])
    solution = (f"sort {first} > .a && sort {second} > .b && join -t, .a .b > {new} && rm .a .b",)
    return Plan({"first": first, "second": second, "new": new}, (FileIs(new, wanted),), solution, files)


@kind("json", 2)
def json_write(d: Draw) -> Plan:
    """a small object, by hand"""
    new, name, city, age = d.file(".json"), d.person(), d.city(), d.number(18, 90)
    value = json.dumps({"name": name, "city": city, "age": age})
    asks = {"new": new, "name": name, "city": city, "age": age}
    return Plan(asks, (JsonIs(new, value),), (f"echo '{value}' > {new}",))


@kind("json", 2)
def json_edit(d: Draw) -> Plan:
    """change one value and nothing else"""
    old, key, other = d.file(".json"), d.word(), d.word()
    before, after = d.numbers(2, 1000, 9000)
    config = {"title": " ".join(d.words(2)), key: before, other: before, "enabled": True, "tags": d.words(3)}
    body = json.dumps(config, indent=2) + "\n"
    solution = (f'sed -i \'s/"{key}": {before}/"{key}": {after}/\' {old}',)
    checks = (JsonIs(old, json.dumps({**config, key: after})),)
    return Plan({"old": old, "key": key, "after": after}, checks, solution, {old: body}, may_change=(old,))


@kind("json", 3)
def jsonl_count(d: Draw) -> Plan:
    """count by a field"""
    old, new = d.file(".jsonl"), d.file(".txt")
    status = ["ok"] * d.number(4, 9) + ["failed"] * d.number(3, 8) + ["failed_later"] * 3
    rows = [{"id": i, "status": s, "note": "failed before"} for i, s in enumerate(d.shuffled(status))]
    solution = (f'grep -c \'"status": "failed"\' {old} > {new}',)
    checks = (NumberIs(new, status.count("failed")),)
    return Plan({"old": old, "new": new}, checks, solution, {old: text([json.dumps(row) for row in rows])})


@kind("json", 3)
def jsonl_field(d: Draw) -> Plan:
    """one field of each line"""
    old, new = d.file(".jsonl"), d.file(".txt")
    rows = [{"id": d.number(100, 999), "user": d.person(), "city": d.city()} for _ in range(6)]
    solution = (f'sed \'s/.*"user": "\\([^"]*\\)".*/\\1/\' {old} > {new}',)
    checks = (FileIs(new, text([row["user"] for row in rows])),)
    return Plan({"old": old, "new": new}, checks, solution, {old: text([json.dumps(row) for row in rows])})


@kind("json", 4)
def csv_to_jsonl(d: Draw) -> Plan:
    """each row as an object"""
    old, new, rows = d.file(".csv"), d.file(".jsonl"), people(d, 5)
    program = '{printf "{\\"name\\": \\"%s\\", \\"city\\": \\"%s\\", \\"amount\\": %s}\\n", $1, $2, $3}'
    solution = (f"tail -n +2 {old} | awk -F, '{program}' > {new}",)
    checks = (JsonLinesAre(new, tuple(json.dumps({"name": n, "city": c, "amount": a}) for n, c, a in rows)),)
    return Plan({"old": old, "new": new}, checks, solution, {old: as_csv(rows)})


@kind("json", 3, held_out=True)
def json_keys(d: Draw) -> Plan:
    """names of the top-level keys"""
    old, new, keys = d.file(".json"), d.file(".txt"), d.words(5)
    body = json.dumps({key: {"size": d.number(1, 9)} for key in keys}, indent=2) + "\n"
    solution = (f'sed -n \'s/^  "\\([^"]*\\)".*/\\1/p\' {old} > {new}',)
    return Plan({"old": old, "new": new}, (LinesAre(new, tuple(keys)),), solution, {old: body})
