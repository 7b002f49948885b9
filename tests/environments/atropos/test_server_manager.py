"""atroposlib's own servers, as hermes-agent uses them: its ServerManager drives a rollout over HTTP."""

from __future__ import annotations

from agent_loop.loop import HermesAgentLoop
from agent_loop.outcome import Outcome
from support.loop_chat_server import chat_server, message, tool_call
from support.loop_servers import assert_paired, echo, tool, user


async def test_a_server_manager_is_accepted_as_it_is():
    from atroposlib.envs.server_handling.server_baseline import APIServerConfig
    from atroposlib.envs.server_handling.server_manager import ServerManager

    async with chat_server(message(None, tool_call({"command": "ls"})), message("done")) as script:
        config = APIServerConfig(
            base_url=script.url, api_key="x", model_name="m", health_check=False, num_requests_for_eval=1
        )
        manager = ServerManager([config], testing=False)
        result = await HermesAgentLoop(manager, [tool()], {"terminal"}, tool_handler=echo).run(user())
    assert result.outcome is Outcome.FINISHED, result.error
    assert_paired(result.messages)
    assert script.requests[1]["messages"] == result.messages[:3]
