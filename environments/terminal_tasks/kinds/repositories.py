"""Git: commit, branch, tag, merge, undo."""

from __future__ import annotations

from environments.shell_text import heredoc
from environments.terminal_tasks.checks import Check, FileIs, KindIs, Missing
from environments.terminal_tasks.draw import Draw, text
from environments.terminal_tasks.git_checks import BranchIs, CommitIs
from environments.terminal_tasks.kinds.kind import kind
from environments.terminal_tasks.terminal_task import Plan


def repository(repo: str, commits: list[dict[str, str]]) -> tuple[str, ...]:
    """Set-up commands of a repository on branch main with one commit per dict of files, messages `step 1`, ..."""
    lines = [
        f"git init -q -b main {repo}",
        f"cd {repo}",
        "git config user.name Agent",
        "git config user.email agent@example.org",
    ]
    for number, files in enumerate(commits, 1):
        lines += [heredoc(name, body) for name, body in files.items()]
        lines += [f"git add -A && git commit -q -m 'step {number}'"]
    return ("set -e\n" + "\n".join(lines),)


IDENTITY = "git config user.name A && git config user.email a@example.org"


@kind("git", 2)
def git_first_commit(d: Draw) -> Plan:
    """init, add, commit"""
    repo, words = d.folder(), " ".join(d.words(2))
    names = {d.file(): text(d.words(3)) for _ in range(2)}
    checks = (CommitIs(repo, "HEAD", tuple(names.items()), message=words, earlier=()),)
    solution = (f"cd {repo} && git init -q && {IDENTITY} && git add -A && git commit -q -m '{words}'",)
    return Plan({"repo": repo, "message": words}, checks, solution, {f"{repo}/{n}": b for n, b in names.items()})


@kind("git", 2)
def git_new_branch(d: Draw) -> Plan:
    """switch -c, change, commit"""
    repo, branch, name, new, words = d.folder(), d.word(), d.file(), d.file(), " ".join(d.words(2))
    before = {name: text(d.words(3))}
    body = d.word()
    checks = (
        BranchIs(repo, branch),
        CommitIs(
            repo, f"refs/heads/{branch}", ((name, before[name]), (new, f"{body}\n")), message=words, earlier=("step 1",)
        ),
        CommitIs(repo, "refs/heads/main", message="step 1", earlier=()),
    )
    add = f"echo {body} > {new} && git add {new} && git commit -q -m '{words}'"
    solution = (f"cd {repo} && git checkout -q -b {branch} && {add}",)
    asks = {"repo": repo, "branch": branch, "new": new, "text": body, "message": words}
    return Plan(asks, checks, solution, commands=repository(repo, [before]))


@kind("git", 2)
def git_tag(d: Draw) -> Plan:
    """tag an earlier commit"""
    repo, tag, name = d.folder(), f"v{d.number(1, 9)}.{d.number(0, 9)}", d.file()
    commits = [{name: text(d.words(2))} for _ in range(3)]
    checks = (
        CommitIs(repo, f"refs/tags/{tag}", message="step 2", earlier=("step 1",)),
        CommitIs(repo, "refs/heads/main", message="step 3", earlier=("step 2", "step 1")),
    )
    return Plan(
        {"repo": repo, "tag": tag}, checks, (f"cd {repo} && git tag {tag} HEAD~1",), commands=repository(repo, commits)
    )


@kind("git", 3)
def git_restore_file(d: Draw) -> Plan:
    """bring back what an earlier commit had"""
    repo, name, other = d.folder(), d.file(), d.file()
    wanted, now = text(d.sentences(3)), text(d.words(2))
    commits = [{name: wanted, other: "one\n"}, {name: now}, {other: "two\n"}]
    checks = (
        FileIs(f"{repo}/{name}", wanted, exact=True),
        FileIs(f"{repo}/{other}", "two\n", exact=True),
        CommitIs(repo, "refs/heads/main", message="step 3", earlier=("step 2", "step 1")),
    )
    solution = (f"cd {repo} && git checkout -q HEAD~2 -- {name}",)
    return Plan({"repo": repo, "name": name}, checks, solution, commands=repository(repo, commits))


@kind("git", 3)
def git_merge(d: Draw) -> Plan:
    """merge a branch with a merge commit"""
    repo, branch, base, left, right = d.folder(), d.word(), d.file(), d.file(), d.file()
    bodies = {name: text(d.words(2)) for name in (base, left, right)}
    (setup,) = repository(repo, [{base: bodies[base]}])
    more = f"\ngit checkout -q -b {branch}\n{heredoc(left, bodies[left])}\ngit add -A && git commit -q -m 'on branch'"
    more += f"\ngit checkout -q main\n{heredoc(right, bodies[right])}\ngit add -A && git commit -q -m 'on main'"
    checks = (BranchIs(repo, "main"), CommitIs(repo, "refs/heads/main", tuple(bodies.items()), merges=2))
    solution = (f"cd {repo} && git merge -q --no-edit {branch}",)
    return Plan({"repo": repo, "branch": branch}, checks, solution, commands=(setup + more,))


@kind("git", 3)
def git_ignore(d: Draw) -> Plan:
    """commit everything but build products"""
    repo, words = d.folder(), " ".join(d.words(2))
    kept = {d.file(".c"): text(d.words(2)) for _ in range(2)}
    left = {d.file(".o"): text(d.words(2)) for _ in range(2)}
    checks: tuple[Check, ...] = (
        CommitIs(repo, "HEAD", (*kept.items(), (".gitignore", "*.o\n")), message=words),
        *(FileIs(f"{repo}/{name}", body, exact=True) for name, body in left.items()),
    )
    solution = (f"cd {repo} && echo '*.o' > .gitignore && git add -A && git commit -q -m '{words}'",)
    start = (f"git init -q -b main {repo} && cd {repo} && {IDENTITY}",)
    return Plan(
        {"repo": repo, "message": words},
        checks,
        solution,
        {f"{repo}/{n}": b for n, b in {**kept, **left}.items()},
        start,
    )


@kind("git", 3, held_out=True)
def git_undo_commit(d: Draw) -> Plan:
    """reset --soft: the commit goes, its change stays"""
    repo, name, new = d.folder(), d.file(), d.file()
    commits = [{name: text(d.words(2))}, {new: text(d.words(2))}]
    checks = (
        CommitIs(repo, "refs/heads/main", tuple(commits[0].items()), message="step 1", earlier=()),
        FileIs(f"{repo}/{new}", commits[1][new], exact=True),
    )
    return Plan(
        {"repo": repo}, checks, (f"cd {repo} && git reset -q --soft HEAD~1",), commands=repository(repo, commits)
    )


@kind("git", 3, held_out=True)
def git_rename(d: Draw) -> Plan:
    """git mv, then commit"""
    repo, old, new, words = d.folder(), d.file(), d.file(), " ".join(d.words(2))
    body = text(d.words(3))
    checks = (
        Missing(f"{repo}/{old}"),
        KindIs(f"{repo}/{new}", "file"),
        CommitIs(repo, "refs/heads/main", ((new, body),), message=words, earlier=("step 1",)),
    )
    solution = (f"cd {repo} && git mv {old} {new} && git commit -q -m '{words}'",)
    asks = {"repo": repo, "old": old, "new": new, "message": words}
    return Plan(asks, checks, solution, commands=repository(repo, [{old: body}]))
