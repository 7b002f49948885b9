"""Scripts to write or mend, and programs to run."""

from __future__ import annotations

from environments.shell_text import heredoc
from environments.terminal_tasks.checks import FileIs, LinesAre, NumberIs, ScriptPrints
from environments.terminal_tasks.draw import Draw, text
from environments.terminal_tasks.kinds.kind import kind
from environments.terminal_tasks.terminal_task import Plan


@kind("scripts", 2)
def greeting_script(d: Draw) -> Plan:
    """one argument"""
    script, word, name = d.file(".sh"), d.word(), d.person()
    solution = (heredoc(script, f'#!/bin/bash\necho "{word}, $1!"\n'), f"chmod +x {script}")
    checks = tuple(ScriptPrints(script, (who,), f"{word}, {who}!", direct=True) for who in (name, "Ann Lee"))
    return Plan({"script": script, "word": word}, checks, solution)


@kind("scripts", 3)
def sum_script(d: Draw) -> Plan:
    """any number of arguments"""
    script, numbers = d.file(".sh"), d.numbers(4, -20, 400)
    solution = (heredoc(script, 's=0\nfor n in "$@"; do s=$((s + n)); done\necho $s\n'),)
    cases = (tuple(map(str, numbers)), (str(numbers[0]),), ())
    checks = tuple(ScriptPrints(script, case, str(sum(map(int, case)))) for case in cases)
    return Plan({"script": script}, checks, solution)


@kind("scripts", 3)
def even_script(d: Draw) -> Plan:
    """the exit code is the answer"""
    script, n = d.file(".sh"), d.number(10, 400)
    solution = (heredoc(script, "if [ $(($1 % 2)) -eq 0 ]; then echo even; else echo odd; exit 1; fi\n"),)
    checks = (ScriptPrints(script, (str(2 * n),), "even"), ScriptPrints(script, (str(2 * n + 1),), "odd", exit_code=1))
    return Plan({"script": script}, checks, solution)


@kind("scripts", 3)
def mend_script(d: Draw) -> Plan:
    """quoting: arguments with spaces are counted wrong"""
    script, words = d.file(".sh"), d.words(4)
    about = "# prints how many arguments it got, then each on its own line"
    broken = text(["#!/bin/bash", about, "echo $#", "for a in $@; do", "  echo $a", "done"])
    case = (f"{words[0]} {words[1]}", words[2], f"{words[3]}  x")
    checks = (ScriptPrints(script, case, text([3, *case])), ScriptPrints(script, (words[0],), text([1, words[0]])))
    solution = (f'sed -i \'s/in $@/in "$@"/; s/echo $a/echo "$a"/\' {script}',)
    return Plan({"script": script}, checks, solution, {script: broken}, may_change=(script,))


@kind("scripts", 4, held_out=True)
def factorial_script(d: Draw) -> Plan:
    """a loop, with 0 as its trap"""
    script = d.file(".sh")
    solution = (heredoc(script, "r=1\nfor ((i = 2; i <= $1; i++)); do r=$((r * i)); done\necho $r\n"),)
    cases = {"0": "1", "1": "1", "5": "120", "12": "479001600"}
    return Plan({"script": script}, tuple(ScriptPrints(script, (n,), out) for n, out in cases.items()), solution)


@kind("processes", 1)
def split_streams(d: Draw) -> Plan:
    """> out 2> err"""
    script, out, err = d.file(".sh"), d.file(".out"), d.file(".err")
    good, bad = d.sentences(3), d.sentences(2)
    body = text([f"echo {good[0]}", f"echo {bad[0]} >&2", f"echo {good[1]}", f"echo {bad[1]} >&2", f"echo {good[2]}"])
    checks = (FileIs(out, text(good)), FileIs(err, text(bad)))
    asks = {"script": script, "out": out, "err": err}
    return Plan(asks, checks, (f"bash {script} > {out} 2> {err}",), {script: body})


@kind("processes", 2)
def exit_codes(d: Draw) -> Plan:
    """$?"""
    scripts, new = [d.file(".sh") for _ in range(3)], d.file(".out")
    codes = d.numbers(3, 2, 90)
    files = {script: f"true\nexit {code}\n" for script, code in zip(scripts, codes, strict=True)}
    wanted = text([f"{script} {code}" for script, code in sorted(zip(scripts, codes, strict=True))])
    solution = (f'for s in *.sh; do bash $s; echo "$s $?"; done > {new}',)
    return Plan({"new": new}, (FileIs(new, wanted),), solution, files)


@kind("processes", 2)
def with_variable(d: Draw) -> Plan:
    """VAR=value command"""
    script, new, key, value = d.file(".sh"), d.file(".out"), d.word().upper(), d.number(100, 999)
    body = f'if [ -z "${key}" ]; then echo "{key} is not set" >&2; exit 1; fi\necho "result $(({key} * 7 + 3))"\n'
    asks = {"script": script, "new": new, "key": key, "value": value}
    return Plan(
        asks, (FileIs(new, f"result {value * 7 + 3}"),), (f"{key}={value} bash {script} > {new}",), {script: body}
    )


@kind("processes", 3)
def time_limit(d: Draw) -> Plan:
    """timeout: what was printed before, and the exit code"""
    script, out, code, words = d.file(".sh"), d.file(".out"), d.file(".code"), d.words(2)
    body = f"echo {words[0]}\nsleep 600\necho {words[1]}\n"
    checks = (FileIs(out, words[0]), NumberIs(code, 124))
    solution = (f"timeout 1 bash {script} > {out}; echo $? > {code}",)
    return Plan({"script": script, "out": out, "code": code}, checks, solution, {script: body})


@kind("processes", 3)
def failing_script(d: Draw) -> Plan:
    """which of many fails"""
    folder, new = d.folder(), d.file(".out")
    names = [d.file(".sh") for _ in range(7)]
    bad = d.sample(range(7), 2)
    files = {f"{folder}/{n}": f"test $((40 + 2)) -eq {41 if i in bad else 42}\n" for i, n in enumerate(names)}
    solution = (f"for s in {folder}/*.sh; do bash $s || basename $s; done > {new}",)
    return Plan({"folder": folder, "new": new}, (LinesAre(new, tuple(names[i] for i in bad)),), solution, files)


@kind("processes", 4, held_out=True)
def pipeline_status(d: Draw) -> Plan:
    """feed one program's output to another"""
    first, second, new, n = d.file(".sh"), d.file(".sh"), d.file(".out"), d.number(5, 30)
    files = {first: f"seq 1 {n}\n", second: "s=0; while read -r x; do s=$((s + x * x)); done; echo $s\n"}
    total = sum(i * i for i in range(1, n + 1))
    solution = (f"bash {first} | bash {second} > {new}",)
    return Plan({"first": first, "second": second, "new": new}, (NumberIs(new, total),), solution, files)
