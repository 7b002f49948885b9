"""Calls tools the way the loop does and reads their JSON."""

import json


class Tools:
    """A runtime whose results come back parsed; the last outcome stays at hand."""

    def __init__(self, runtime, sandbox):
        self.runtime = runtime
        self.sandbox = sandbox
        self.outcome = None

    async def __call__(self, name, **arguments):
        self.outcome = await self.runtime.call(name, arguments, call_id="call_1")
        result = json.loads(self.outcome.text)
        assert isinstance(result, dict)
        return result

    async def sh(self, command):
        """Output of a command that must succeed, run beside the tools."""
        result = await self.sandbox.exec(command, timeout_s=30)
        assert result.exit_code == 0, result.output
        return result.output

    async def script(self, code):
        """Run a script that must succeed; its output."""
        result = await self("execute_code", code=code)
        assert result["status"] == "success", result
        return result["output"]
