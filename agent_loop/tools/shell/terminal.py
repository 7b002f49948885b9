"""terminal: one command in the foreground, or the start of one in the background. A command runs once, never again."""

from __future__ import annotations

import re
from typing import Any

from agent_loop.tools.output import cap_bytes, strip_ansi
from agent_loop.tools.shell.process_table import Background, Watch
from agent_loop.tools.tool import CallContext, InvalidArguments, Tool, load_schema, outcome_of
from agent_loop.turn.tool_call import ToolOutcome, output_keeper

_PROGRAMS = {
    "editor": ("vim", "vi", "nvim", "nano", "emacs", "pico"),
    "pager": ("less", "more", "man"),
    "monitor": ("top", "htop", "watch", "btop"),
    "session": ("ssh", "telnet", "ftp", "sftp", "tmux", "screen"),
}
_KINDS = {program: kind for kind, programs in _PROGRAMS.items() for program in programs}
_ADVICE = {
    "editor": "Edit files with write_file or patch, or with sed in the terminal.",
    "pager": "Use cat, head or tail instead, or pipe into cat.",
    "monitor": "Use a one-shot form instead, e.g. top -b -n 1 or ps aux.",
    "session": "Give the remote command on the command line, or start it with background=true and pty=true.",
}
_INTERPRETERS = ("python", "python3", "node", "ipython", "psql", "mysql", "sqlite3", "irb", "gdb")
_SUDO_TROUBLE = re.compile(
    r"^sudo: .*(password|terminal is required|no tty|no new privileges|effective uid|setuid|unable to)"
    r"|^.*: sudo: command not found",
    re.MULTILINE,
)


def interactive_hint(command: str) -> str | None:
    """Advice when the command starts a program that wants a person at a terminal."""
    for part in re.split(r"&&|\|\||[;|&\n]", command):
        words = [word for word in part.split() if not re.fullmatch(r"\w+=\S*", word)]
        if words[:1] == ["sudo"]:
            del words[0]
        if words and (hint := _program_hint(words, piped="|" in command)):
            return hint
    return None


def _program_hint(words: list[str], *, piped: bool) -> str | None:
    program = words[0].rsplit("/", 1)[-1]
    if (kind := _KINDS.get(program)) is not None:
        return f"{program} needs a terminal. {_ADVICE[kind]}"
    if program in _INTERPRETERS and len(words) == 1 and not piped:
        return f"{program} without arguments waits for input. Pass the code (-c) or a file, or use pty=true."
    if program == "git" and words[1:2] == ["rebase"] and ("-i" in words or "--interactive" in words):
        return "git rebase -i opens an editor. Set GIT_SEQUENCE_EDITOR, or use non-interactive commands."
    return None


def sudo_hint(command: str, output: str) -> str | None:
    """A clear text when sudo could not work: there is no password and nobody to type one."""
    if "sudo" in command and "no new privileges" in output:
        return (
            "sudo cannot work here: no process of this sandbox may gain privileges (no_new_privs). "
            "Run the command without sudo."
        )
    if "sudo" in command and _SUDO_TROUBLE.search(output):
        return "sudo does not work here: there is no password to give. Run the command without sudo."
    return None


_NO_MATCH = "nothing was found, which is not an error"
_DIFFERS = "the two differ, which is not an error"
_FALSE = "the condition is false, which is not an error"
_MEANINGS: dict[str, dict[int, str]] = {
    **{key: {1: _NO_MATCH} for key in ("grep", "egrep", "fgrep", "zgrep", "rg", "ag", "ack")},
    **{key: {1: _DIFFERS} for key in ("diff", "colordiff", "cmp")},
    **{key: {1: _FALSE} for key in ("test", "[", "[[")},
    "pgrep": {1: "no process matched, which is not an error"},
    "find": {1: "some folders could not be read; what was found is still shown"},
    "git": {1: "often not an error: git diff and git grep end so when there are differences, or no matches"},
    "curl": {
        6: "the host's name could not be resolved",
        7: "the host could not be connected to",
        22: "the server answered with an HTTP error such as 404 or 500",
        28: "the request took too long",
    },
    "pytest": {1: "tests failed", 2: "the run was interrupted", 4: "wrong usage", 5: "no tests were collected"},
}


def exit_code_meaning(command: str, exit_code: int) -> str | None:
    """What a non-zero exit code of the last program of a command says, where it is not simply a failure."""
    if not exit_code:
        return None
    words = re.split(r"&&|\|\||[;|\n]", command.strip().rstrip(";"))[-1].split()
    program = next((word for word in words if not re.fullmatch(r"\w+=\S*", word)), "")
    return _MEANINGS.get(program.rsplit("/", 1)[-1], {}).get(exit_code)


_IGNORED = {
    "check_interval": "check_interval is ignored: use notify_on_complete or watch_patterns to be told of a process.",
    "force": "force is ignored: the rules of this environment always apply.",
}
_NOTICE_CHARS = 2_000


async def run(ctx: CallContext, arguments: dict[str, Any]) -> dict[str, Any] | ToolOutcome:
    """Run the command as the arguments ask."""
    command = arguments["command"]
    _check_text(command, "command")
    workdir = arguments.get("workdir")
    if workdir:
        workdir = await ctx.workspace.resolve(workdir)
    ignored = [said for name, said in _IGNORED.items() if arguments.get(name)]
    if arguments.get("background"):
        return _noted(await _start(ctx, arguments, workdir), ignored)
    if arguments.get("notify_on_complete") or arguments.get("watch_patterns"):
        ignored.append("notify_on_complete and watch_patterns apply to background=true only.")
    timeout_s, note = _clamped(arguments.get("timeout"), ctx)
    run_command = _foreground_pty if arguments.get("pty") else _foreground
    data, timed_out = await run_command(ctx, command, workdir, timeout_s)
    if note:
        data["timeout_note"] = note
    return outcome_of(_noted(data, ignored), timed_out=timed_out)


def _noted(data: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    said = [data["note"], *notes] if "note" in data else notes
    return {**data, "note": " ".join(said)} if said else data


def _check_text(text: str, what: str) -> None:
    if not text.strip():
        raise InvalidArguments(f"The {what} is empty.", exit_code=-1, output="")
    if "\0" in text:
        raise InvalidArguments(f"The {what} has a NUL character, which no shell takes.", exit_code=-1, output="")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArguments(
            f"The {what} has characters that are not valid Unicode.", exit_code=-1, output=""
        ) from None


def _clamped(asked: int | None, ctx: CallContext) -> tuple[int, str | None]:
    most = ctx.config.max_timeout_s
    if asked is not None and asked > most:
        return most, f"The timeout of {asked} s was lowered to {most} s. Use background=true for longer commands."
    return max(1, asked or ctx.config.default_timeout_s), None


async def _foreground(
    ctx: CallContext, command: str, workdir: str | None, timeout_s: int
) -> tuple[dict[str, Any], bool]:
    """The result, and whether the command was stopped at its timeout."""
    cwd, keep = workdir or ctx.workspace.start(), output_keeper()
    result = await ctx.sandbox.exec(
        command,
        timeout_s=timeout_s,
        cwd=cwd,
        max_output_chars=ctx.config.max_output_chars,
        on_activity=ctx.while_running("terminal"),
        on_stopped=lambda stopped: keep(ctx.redact(strip_ansi(stopped.output))),
    )
    if failure := ctx.workspace.unusable(cwd, result):
        raise failure
    if workdir is None:  # one that ran in a directory of its own does not move the session
        ctx.workspace.after_command(result.cwd)
    data = _result(ctx, command, result.output, result.exit_code)
    if result.timed_out:
        data["error"] = f"The command was killed after {timeout_s} s. Its output so far is above."
        _add_hint(data, interactive_hint(command) or "Set a longer timeout, or use background=true.")
    if result.truncation:
        data["truncation"] = {
            "total_chars": result.truncation.total_chars,
            "omitted_chars": result.truncation.omitted_chars,
            "full_output": result.truncation.log_path,
        }
    return data, result.timed_out


def _result(ctx: CallContext, command: str, output: str, exit_code: int) -> dict[str, Any]:
    clean = ctx.redact(strip_ansi(output))
    data: dict[str, Any] = {"output": clean, "exit_code": exit_code, "error": None}
    if meaning := exit_code_meaning(command, exit_code):
        data["exit_code_meaning"] = meaning
    if exit_code:
        _add_hint(data, sudo_hint(command, clean) or interactive_hint(command))
    return data


def _add_hint(data: dict[str, Any], hint: str | None) -> None:
    if hint:
        data["hint"] = hint


async def _foreground_pty(
    ctx: CallContext, command: str, workdir: str | None, timeout_s: int
) -> tuple[dict[str, Any], bool]:
    """The same on a pseudo-terminal; what the command started is gone when the call returns."""
    cwd = workdir or ctx.workspace.cwd
    await ctx.workspace.check_directory(cwd)
    process = await ctx.sandbox.spawn(command, pty=True, cwd=cwd)
    exit_code: int | None = None
    try:
        exit_code = await process.wait(timeout_s=timeout_s)
    finally:
        if exit_code is None:
            await process.kill()
            output_keeper()(ctx.redact(strip_ansi((await process.log(offset=0)).data)))
    chunk = await process.log(offset=0)
    timed_out = exit_code is None
    output, _ = cap_bytes(chunk.data.replace("\r\n", "\n"), ctx.config.max_output_chars)
    data = _result(ctx, command, output, 124 if exit_code is None else exit_code)
    if timed_out:
        data["error"] = f"The command was killed after {timeout_s} s. Its output so far is above."
    if chunk.dropped:
        data["truncation"] = {"omitted_bytes": chunk.dropped}
    return data, timed_out


async def _start(ctx: CallContext, arguments: dict[str, Any], workdir: str | None) -> dict[str, Any]:
    cwd = workdir or ctx.workspace.cwd
    await ctx.workspace.check_directory(cwd)
    entry = await ctx.processes.start(arguments["command"], pty=bool(arguments.get("pty")), cwd=cwd)
    data: dict[str, Any] = {
        "output": "Background process started",
        "session_id": entry.session_id,
        "pid": entry.process.pid,
        "exit_code": 0,
        "error": None,
    }
    if arguments.get("timeout") is not None:
        data["note"] = "timeout does not apply to background commands."
    patterns = tuple(pattern for pattern in arguments.get("watch_patterns") or () if pattern)
    notify = bool(arguments.get("notify_on_complete"))
    if notify or patterns:
        watch = Watch(
            notify,
            patterns,
            describe_end=lambda done, output: _end_notice(ctx, done, output),
            describe_match=lambda found, pattern, lines: _match_notice(ctx, found, pattern, lines),
        )
        ctx.processes.watch(entry, watch)
    if notify:
        data["notify_on_complete"] = True
    if patterns:
        data["watch_patterns"] = list(patterns)
    return data


def _match_notice(ctx: CallContext, entry: Background, pattern: str, lines: list[str]) -> str:
    matched = ctx.redact(strip_ansi("\n".join(lines)))[:_NOTICE_CHARS]
    return (
        f'[SYSTEM: Background process {entry.session_id} matched watch pattern "{pattern}".\n'
        f"Command: {ctx.redact(entry.command)[:200]}\nMatched output:\n{matched}]"
    )


def _end_notice(ctx: CallContext, entry: Background, output: str) -> str:
    tail = ctx.redact(strip_ansi(output))[-_NOTICE_CHARS:]
    command = ctx.redact(entry.command)[:200]
    return (
        f"[SYSTEM: Background process {entry.session_id} completed (exit code {entry.exit_code}).\n"
        f"Command: {command}\nOutput:\n{tail}]"
    )


TOOL = Tool(
    schema=load_schema("terminal"),
    toolset="terminal",
    run=run,
    script_parameters=("command", "timeout", "workdir"),
)
