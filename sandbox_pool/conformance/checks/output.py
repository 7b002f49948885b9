"""What comes back of what a command prints."""

from __future__ import annotations

from sandbox_pool.conformance.check import check, expect, expect_equal
from sandbox_pool.conformance.context import CheckContext


@check()
async def stdout_and_stderr_in_order(ctx: CheckContext) -> None:
    """stdout and stderr come merged in the order they were written."""
    async with ctx.lease() as box:
        result = await box.exec("for i in 1 2 3; do echo o$i; echo e$i >&2; done")
    expect_equal(result.output, "o1\ne1\no2\ne2\no3\ne3\n", "output")


@check()
async def stderr_apart_on_request(ctx: CheckContext) -> None:
    """stderr comes apart when it is asked for."""
    async with ctx.lease() as box:
        result = await box.exec("echo out; echo err >&2", merge_stderr=False)
    expect_equal((result.output, result.stderr), ("out\n", "err\n"))


@check()
async def utf8_across_chunks(ctx: CheckContext) -> None:
    """Characters of several bytes survive being written in pieces."""
    async with ctx.lease() as box:
        result = await box.exec(
            "printf '\\xf0\\x9f'; sleep 0.2; printf '\\x98\\x80'; sleep 0.1; printf '\\xc3'; printf '\\xa9'"
        )
    expect_equal(result.output, "😀é", "output")


@check()
async def bad_bytes_are_replaced(ctx: CheckContext) -> None:
    """Bytes that are not UTF-8 are replaced; nothing fails."""
    async with ctx.lease() as box:
        result = await box.exec("printf 'a\\xff\\xfeb\\x00c'")
    expect_equal(result.output, "a\ufffd\ufffdb\x00c", "output")


@check()
async def long_output_keeps_head_and_tail(ctx: CheckContext) -> None:
    """Output above the cap keeps its head and tail, with exact counts."""
    async with ctx.lease() as box:
        result = await box.exec("seq 1 100000", max_output_chars=10_000)
        truncation = result.truncation
        expect(truncation is not None, "truncation is None")
        assert truncation is not None
        expect_equal(truncation.total_chars, sum(len(str(n)) + 1 for n in range(1, 100_001)), "total_chars")
        expect(len(result.output) <= 11_000, f"{len(result.output)} characters came back")
        expect(result.output.startswith("1\n2\n3\n"), "the head is missing")
        expect(result.output.endswith("99999\n100000\n"), "the tail is missing")


@check()
async def the_whole_output_is_in_a_file(ctx: CheckContext) -> None:
    """What was left out can be read from a file in the slot."""
    async with ctx.lease() as box:
        result = await box.exec("seq 1 50000", max_output_chars=1_000)
        expect(result.truncation is not None, "truncation is None")
        assert result.truncation is not None
        data = await box.read_file(result.truncation.log_path)
    expect_equal(data, b"".join(b"%d\n" % n for n in range(1, 50_001)), "the log")


@check()
async def short_output_is_not_marked(ctx: CheckContext) -> None:
    """Output up to the cap comes back whole and unmarked."""
    async with ctx.lease() as box:
        result = await box.exec("head -c 50000 /dev/zero | tr '\\0' x")
    expect_equal((len(result.output), result.truncation), (50_000, None))


@check()
async def the_default_cap_is_fifty_thousand(ctx: CheckContext) -> None:
    """Without a cap of its own a call returns 50,000 characters, 40 % head and 60 % tail."""
    async with ctx.lease() as box:
        result = await box.exec("head -c 30000 /dev/zero | tr '\\0' a; head -c 70000 /dev/zero | tr '\\0' b")
    kept_a, kept_b = result.output.count("a"), result.output.count("b")
    expect(19_000 <= kept_a <= 21_000, f"{kept_a} characters of the head were kept")
    expect(29_000 <= kept_b <= 31_000, f"{kept_b} characters of the tail were kept")


@check(timeout_s=90.0)
async def a_flood_does_not_fill_memory(ctx: CheckContext) -> None:
    """A hundred megabytes of output cost neither time out of bounds nor the slot."""
    async with ctx.lease() as box:
        result = await box.exec("head -c 100000000 /dev/zero | tr '\\0' x", timeout_s=80)
        after = await box.exec("echo still here")
    expect(len(result.output) < 60_000, f"{len(result.output)} characters came back")
    expect(result.truncation is not None, "truncation is None")
    expect_equal(after.output, "still here\n", "output of the next command")


@check()
async def output_cannot_forge_the_outcome(ctx: CheckContext) -> None:
    """Whatever a command prints, exit code, timeout and directory stay what they are."""
    forged = '{"exit_code": 0, "timed_out": true, "cwd": "/forged"}'
    async with ctx.lease() as box:
        result = await box.exec(f"printf '%s\\n\\0\\x1b]0;x\\a__EXIT__0\\n' '{forged}' '{forged}' >&2; exit 5")
    expect_equal((result.exit_code, result.timed_out, "/forged" in result.cwd), (5, False, False))


@check()
async def writing_to_every_descriptor_changes_nothing(ctx: CheckContext) -> None:
    """A command that writes to all descriptors it can reach cannot speak to the server."""
    async with ctx.lease() as box:
        command = "for fd in $(seq 3 64); do echo '{\"exit_code\":0}' >&$fd; done 2>/dev/null; exit 6"
        result = await box.exec(command)
        after = await box.exec("echo ok")
    expect_equal((result.exit_code, after.output), (6, "ok\n"))


@check()
async def carriage_returns_are_kept(ctx: CheckContext) -> None:
    """Line ends come back as they were written."""
    async with ctx.lease() as box:
        result = await box.exec("printf 'a\\r\\nb\\rc'")
    expect_equal(result.output, "a\r\nb\rc", "output")
