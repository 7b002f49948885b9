"""Text processing: sort, count, cut, replace, join."""

from __future__ import annotations

from collections import Counter

from environments.terminal_tasks.checks import Check, EntriesAre, FileIs, LinesAre, Missing, NumberIs
from environments.terminal_tasks.draw import Draw, text
from environments.terminal_tasks.kinds.kind import kind
from environments.terminal_tasks.terminal_task import Plan


@kind("text", 0)
def sort_lines(d: Draw) -> Plan:
    """sort"""
    old, new, words = d.file(), d.file(), d.words(5)
    if words == sorted(words):
        words.reverse()
    return Plan(
        {"old": old, "new": new}, (FileIs(new, text(sorted(words))),), (f"sort {old} > {new}",), {old: text(words)}
    )


@kind("text", 0)
def count_lines(d: Draw) -> Plan:
    """wc -l"""
    old, new, count = d.file(), d.file(), d.number(4, 30)
    return Plan(
        {"old": old, "new": new}, (NumberIs(new, count),), (f"wc -l < {old} > {new}",), {old: text(d.sentences(count))}
    )


@kind("text", 1)
def first_lines(d: Draw) -> Plan:
    """head"""
    old, new, lines, n = d.file(), d.file(), d.sentences(20), d.number(2, 9)
    return Plan(
        {"old": old, "new": new, "n": n},
        (FileIs(new, text(lines[:n])),),
        (f"head -n {n} {old} > {new}",),
        {old: text(lines)},
    )


@kind("text", 1)
def last_lines(d: Draw) -> Plan:
    """tail"""
    old, new, lines, n = d.file(), d.file(), d.sentences(20), d.number(2, 9)
    return Plan(
        {"old": old, "new": new, "n": n},
        (FileIs(new, text(lines[-n:])),),
        (f"tail -n {n} {old} > {new}",),
        {old: text(lines)},
    )


@kind("text", 1)
def unique_lines(d: Draw) -> Plan:
    """sort -u"""
    old, new, words = d.file(), d.file(), d.words(6)
    lines = d.shuffled(words + words[:3] + words[:1])
    return Plan(
        {"old": old, "new": new}, (FileIs(new, text(sorted(words))),), (f"sort -u {old} > {new}",), {old: text(lines)}
    )


@kind("text", 1)
def lines_with_word(d: Draw) -> Plan:
    """grep"""
    old, new, word = d.file(), d.file(), d.word()
    plain = [line for line in d.sentences(12) if word not in line]
    hits = [f"{a} {word} {b}" for a, b in (d.words(2) for _ in range(3))]
    lines = d.shuffled(plain + hits)
    found = text([line for line in lines if word in line])
    return Plan(
        {"old": old, "new": new, "word": word},
        (FileIs(new, found),),
        (f"grep {word} {old} > {new}",),
        {old: text(lines)},
    )


@kind("text", 1)
def replace_word(d: Draw) -> Plan:
    """sed -i s///g"""
    old, before, after, third = d.file(), d.word(), d.word(), d.word()
    body = text([f"{before} {third} {before}", f"{third} {third}", f"the {before} is {third}", before])
    checks = (FileIs(old, body.replace(before, after)),)
    asks = {"old": old, "before": before, "after": after}
    return Plan(asks, checks, (f"sed -i s/{before}/{after}/g {old}",), {old: body}, may_change=(old,))


@kind("text", 1)
def upper_case(d: Draw) -> Plan:
    """tr"""
    old, new = d.file(), d.file()
    body = text(d.sentences(5))
    return Plan({"old": old, "new": new}, (FileIs(new, body.upper()),), (f"tr a-z A-Z < {old} > {new}",), {old: body})


@kind("text", 1)
def reverse_lines(d: Draw) -> Plan:
    """tac"""
    old, new, lines = d.file(), d.file(), d.sentences(8)
    return Plan(
        {"old": old, "new": new}, (FileIs(new, text(lines[::-1])),), (f"tac {old} > {new}",), {old: text(lines)}
    )


@kind("text", 2)
def join_files(d: Draw) -> Plan:
    """cat in a given order"""
    parts = [d.file() for _ in range(3)]
    files = {name: text(d.sentences(2)) for name in parts}
    order, new = d.shuffled(parts), d.file()
    joined = "".join(files[name] for name in order)
    asks = {"first": order[0], "second": order[1], "third": order[2], "new": new}
    return Plan(asks, (FileIs(new, joined),), (f"cat {' '.join(order)} > {new}",), files)


@kind("text", 2)
def line_range(d: Draw) -> Plan:
    """sed -n a,bp"""
    old, new, lines = d.file(), d.file(), d.sentences(40)
    start = d.number(5, 18)
    end = start + d.number(3, 12)
    asks = {"old": old, "new": new, "start": start, "end": end}
    return Plan(
        asks,
        (FileIs(new, text(lines[start - 1 : end])),),
        (f"sed -n {start},{end}p {old} > {new}",),
        {old: text(lines)},
    )


@kind("text", 2)
def longest_line(d: Draw) -> Plan:
    """awk over lengths"""
    old, new = d.file(), d.file()
    longest = " ".join(d.words(9))
    lines = d.shuffled([*d.sentences(12, 3), longest])
    solution = (f"awk 'length > n {{n = length; line = $0}} END {{print line}}' {old} > {new}",)
    return Plan({"old": old, "new": new}, (FileIs(new, longest),), solution, {old: text(lines)})


@kind("text", 2)
def drop_blank_lines(d: Draw) -> Plan:
    """blank lines may hold spaces and tabs"""
    old, lines = d.file(), d.sentences(6)
    body = "".join(
        f"{line}\n{blank}" for line, blank in zip(lines, ["\n", "", "  \n", "\n\n", "\t\n", ""], strict=True)
    )
    return Plan(
        {"old": old},
        (FileIs(old, text(lines)),),
        (f"sed -i '/^[[:space:]]*$/d' {old}",),
        {old: body},
        may_change=(old,),
    )


@kind("text", 2)
def unix_line_ends(d: Draw) -> Plan:
    """CRLF to LF"""
    old = d.file()
    body = text(d.sentences(6))
    solution = (f"sed -i 's/\\r$//' {old}",)
    return Plan(
        {"old": old}, (FileIs(old, body, exact=True),), solution, {old: body.replace("\n", "\r\n")}, may_change=(old,)
    )


@kind("text", 2)
def sum_numbers(d: Draw) -> Plan:
    """awk sum"""
    old, new, numbers = d.file(), d.file(), d.numbers(15, -50, 900)
    solution = (f"awk '{{s += $1}} END {{print s}}' {old} > {new}",)
    return Plan({"old": old, "new": new}, (NumberIs(new, sum(numbers)),), solution, {old: text(numbers)})


@kind("text", 2)
def numeric_sort(d: Draw) -> Plan:
    """sort -n: 9 comes before 10"""
    old, new, numbers = d.file(), d.file(), [9, 10, 100, *d.numbers(8, 101, 2000)]
    lines = d.shuffled(numbers)
    checks = (FileIs(new, text(sorted(numbers, reverse=True))),)
    return Plan({"old": old, "new": new}, checks, (f"sort -nr {old} > {new}",), {old: text(lines)})


@kind("text", 3)
def most_frequent_word(d: Draw) -> Plan:
    """tr | sort | uniq -c | sort"""
    old, new, words = d.file(), d.file(), d.words(7)
    bag = [word for count, word in enumerate(words, 2) for _ in range(count)]
    shuffled = d.shuffled(bag)
    lines = [" ".join(shuffled[i : i + 6]) for i in range(0, len(shuffled), 6)]
    word, count = Counter(bag).most_common(1)[0]
    solution = (f"tr ' ' '\\n' < {old} | sort | uniq -c | sort -nr | head -n 1 | awk '{{print $2, $1}}' > {new}",)
    return Plan({"old": old, "new": new}, (FileIs(new, f"{word} {count}"),), solution, {old: text(lines)})


@kind("text", 3)
def common_lines(d: Draw) -> Plan:
    """comm -12 on sorted input"""
    first, second, new = d.file(), d.file(), d.file()
    both, left, right = d.words(4), d.words(5), d.words(5)
    files = {first: text(d.shuffled(both + left)), second: text(d.shuffled(both + right))}
    solution = (f"sort {first} > .a && sort {second} > .b && comm -12 .a .b > {new} && rm .a .b",)
    return Plan({"first": first, "second": second, "new": new}, (LinesAre(new, tuple(both)),), solution, files)


@kind("text", 3)
def split_file(d: Draw) -> Plan:
    """split -l with numbered parts"""
    old, folder, size = d.file(), d.folder(), d.number(3, 6)
    lines = d.sentences(size * 3)
    parts = {f"part{i}.txt": text(lines[i * size : (i + 1) * size]) for i in range(3)}
    bodies = (FileIs(f"{folder}/{name}", body) for name, body in parts.items())
    checks: tuple[Check, ...] = (EntriesAre(folder, tuple(parts)), *bodies)
    solution = (f"mkdir {folder} && split -l {size} -a 1 -d --additional-suffix=.txt {old} {folder}/part",)
    return Plan({"old": old, "folder": folder, "size": size}, checks, solution, {old: text(lines)})


@kind("text", 3, held_out=True)
def interleave_files(d: Draw) -> Plan:
    """paste -d '\\n'"""
    first, second, new = d.file(), d.file(), d.file()
    one, two = d.sentences(5), d.sentences(5)
    merged = text([line for pair in zip(one, two, strict=True) for line in pair])
    solution = (f"paste -d '\\n' {first} {second} > {new}",)
    return Plan(
        {"first": first, "second": second, "new": new},
        (FileIs(new, merged),),
        solution,
        {first: text(one), second: text(two)},
    )


@kind("text", 2, held_out=True)
def second_column(d: Draw) -> Plan:
    """awk '{print $2}' over uneven blanks"""
    old, new = d.file(), d.file()
    rows = [d.words(3) for _ in range(6)]
    lines = [f"{a}{' ' * d.number(1, 5)}{b}{' ' * d.number(1, 5)}{c}" for a, b, c in rows]
    checks = (FileIs(new, text([row[1] for row in rows])),)
    return Plan({"old": old, "new": new}, checks, (f"awk '{{print $2}}' {old} > {new}",), {old: text(lines)})


@kind("text", 1, held_out=True)
def merge_and_remove(d: Draw) -> Plan:
    """append one file to another, then delete it"""
    first, second = d.file(), d.file()
    one, two = text(d.sentences(3)), text(d.sentences(2))
    checks = (FileIs(first, one + two), Missing(second))
    solution = (f"cat {second} >> {first} && rm {second}",)
    return Plan(
        {"first": first, "second": second}, checks, solution, {first: one, second: two}, may_change=(first, second)
    )
