"""Calls tools the way the loop does and reads their JSON."""

import json
import shlex

from support.pool_wait import eventually


class Tools:
    """A runtime whose results come back parsed; the last outcome stays at hand."""

    def __init__(self, runtime, sandbox):
        self.runtime = runtime
        self.sandbox = sandbox
        self.outcome = None

    async def __call__(self, name, **arguments):
        self.outcome = await self.runtime.checked_call(name, arguments)
        result = json.loads(self.outcome.text)
        assert isinstance(result, dict)
        return result

    async def sh(self, command):
        """Output of a command that must succeed, run beside the tools."""
        result = await self.sandbox.exec(command, timeout_s=30)
        assert result.exit_code == 0, result.output
        return result.output

    async def running(self, pattern):
        """Command lines of the sandbox that match.

        Without a PID namespace every process of the machine is visible: those of this sandbox work in its folder.
        """
        found = await self.sh(f"""for p in $(pgrep -f {shlex.quote(pattern)}); do
            case $(readlink /proc/$p/cwd) in "$(pwd -P)"*) tr '\\0' ' ' < /proc/$p/cmdline; echo ;; esac
        done; true""")
        return [line.strip() for line in found.splitlines()]

    async def started(self, *commands):
        """Wait until these command lines are there: a child has its parent's until it execs."""

        async def there():
            return set(commands) <= set(await self.running("|".join(commands)))

        await eventually(there)

    async def gone(self, pattern):
        """Whether no command line of the sandbox matches any more; a kill may take a moment."""

        async def none():
            return not await self.running(pattern)

        return await eventually(none)

    async def script(self, code):
        """Run a script that must succeed; its output."""
        result = await self("execute_code", code=code)
        assert result["status"] == "success", result
        return result["output"]
