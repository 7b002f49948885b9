"""Chat servers: a real HTTP server behind AsyncOpenAI, and objects with hermes-agent's `chat_completion`."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from openai import AsyncOpenAI

from agent_loop.loop import HermesAgentLoop
from agent_loop.model.chat import ChatServer, extract_reasoning
from agent_loop.model.contract import ModelError, ModelRefused, ModelUnavailable, Sampling
from agent_loop.model.errors import RetryPolicy, translate
from agent_loop.outcome import Outcome
from agent_loop.records.record import AgentResult
from agent_loop.turn.tool_call import ToolStatus
from support.loop_chat_server import chat_server, message, tool_call
from support.loop_servers import ScriptedServer, assert_paired, echo, says, tool, user

FAST = RetryPolicy(attempts=3, base_s=0.0)


async def over_http(*answers: Any, **options: Any) -> tuple[AgentResult, list[dict[str, Any]]]:
    """One rollout through AsyncOpenAI against a scripted HTTP server."""
    async with chat_server(*answers) as script, AsyncOpenAI(base_url=script.url, api_key="x") as client:
        options = {"tool_handler": echo, "retry": FAST, "model": "m", **options}
        result = await HermesAgentLoop(client, [tool()], {"terminal"}, **options).run(user())
    assert_paired(result.messages)
    return result, script.requests


async def test_a_rollout_over_http_sends_what_the_trajectory_says():
    result, requests = await over_http(message(None, tool_call({"command": "ls"})), message("done"))
    assert result.outcome is Outcome.FINISHED
    assert requests[1]["messages"] == result.messages[:3]
    assert requests[0]["tools"] == [tool()]
    assert requests[0]["model"] == "m"
    assert result.turns[0].prompt_tokens == 100
    assert result.metrics["sampled_tokens"] == 14


async def test_sampling_options_are_sent_only_when_set():
    _, requests = await over_http(message("done"))
    assert "max_tokens" not in requests[0]
    assert requests[0]["temperature"] == 1.0
    _, requests = await over_http(message("done"), temperature=0.3, max_tokens=50, extra_body={"top_k": 5})
    assert requests[0]["max_tokens"] == 50
    assert requests[0]["temperature"] == 0.3
    assert requests[0]["top_k"] == 5
    _, requests = await over_http(message("done"), sampling=Sampling(top_p=0.5, seed=3, stop=("END",)))
    assert (requests[0]["top_p"], requests[0]["seed"], requests[0]["stop"]) == (0.5, 3, ["END"])


async def test_overload_and_server_errors_are_tried_again_each_once_per_attempt():
    result, requests = await over_http((429, "slow down"), (503, "busy"), message("done"))
    assert result.outcome is Outcome.FINISHED
    assert len(requests) == 3
    result, requests = await over_http(*[(500, "broken")] * 3)
    assert result.outcome is Outcome.API_ERROR
    assert len(requests) == 3
    assert "broken" in (result.error or "")


async def test_a_server_that_asks_for_a_pause_is_left_alone_that_long():
    response = SimpleNamespace(headers={"Retry-After": "7"})
    error = translate(type("RateLimitError", (Exception,), {"status_code": 429, "response": response})("slow down"))
    assert isinstance(error, ModelUnavailable)
    assert error.retry_after_s == 7.0
    dated = SimpleNamespace(headers={"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"})
    error = translate(type("RateLimitError", (Exception,), {"status_code": 429, "response": dated})("slow down"))
    assert isinstance(error, ModelUnavailable)
    assert error.retry_after_s is None


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
async def test_refusals_are_not_tried_again(status):
    result, requests = await over_http((status, "no such thing"))
    assert result.outcome is Outcome.API_ERROR
    assert len(requests) == 1
    assert result.turns_used == 1
    assert not result.finished_naturally


async def test_a_prompt_called_too_long_ends_as_context_overflow():
    result, _ = await over_http((400, "This model's maximum context length is 4096 tokens."))
    assert result.outcome is Outcome.CONTEXT_OVERFLOW
    assert result.outcome.trainable


async def test_a_prompt_called_too_long_is_shortened_when_a_limit_was_given():
    async def big(name: str, arguments: dict[str, Any], task_id: str) -> str:
        return "x" * 40_000

    made = [message(None, tool_call({"command": str(i)}, call_id=f"c{i}")) for i in range(5)]
    too_long = (400, "maximum context length exceeded")
    result, requests = await over_http(*made, too_long, message("done"), tool_handler=big, max_context_tokens=10**6)
    assert result.outcome is Outcome.FINISHED
    assert len(json.dumps(requests[-1])) < 0.8 * len(json.dumps(requests[-2]))
    assert result.truncations[0]["turn"] == 6


async def test_nobody_listening_is_an_api_error():
    async with AsyncOpenAI(base_url="http://127.0.0.1:1/v1", api_key="x") as client:
        result = await HermesAgentLoop(client, model="m", retry=FAST).run(user())
    assert result.outcome is Outcome.API_ERROR
    assert "Connection" in (result.error or "")


async def test_an_answer_without_choices_is_an_api_error():
    result, _ = await over_http({"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": []})
    assert result.outcome is Outcome.API_ERROR


async def test_calls_in_the_text_are_read_when_the_server_did_not():
    text = 'Looking.\n<tool_call>\n{"name": "terminal", "arguments": {"command": "ls"}}\n</tool_call>'
    result, requests = await over_http(message(text), message("done"))
    assert result.tool_calls[0].status is ToolStatus.OK
    assert requests[1]["messages"][1]["tool_calls"][0]["function"]["name"] == "terminal"
    assert requests[1]["messages"][1]["content"].strip() == "Looking."


async def test_malformed_markup_in_the_text_is_not_a_final_answer():
    result, requests = await over_http(message('<tool_call>\n{"arguments": \n</tool_call>'), message("done"))
    assert len(requests) == 2
    assert result.metrics["tool_calls_malformed"] == 1
    assert "could not be read" in requests[1]["messages"][-1]["content"]


async def test_a_bad_call_next_to_a_good_one_costs_it_nothing():
    good = '<tool_call>\n{"name": "terminal", "arguments": {"command": "ls"}}\n</tool_call>'
    result, requests = await over_http(message(f"{good}\n<tool_call>\n###\n</tool_call>"), message("done"))
    assert [record.status for record in result.tool_calls] == [ToolStatus.OK, ToolStatus.MALFORMED]
    assert_paired(requests[1]["messages"])


async def test_arguments_that_are_not_json_reach_the_server_as_json():
    result, requests = await over_http(message(None, tool_call('{"command": "ls')), message("done"))
    sent = json.loads(requests[1]["messages"][1]["tool_calls"][0]["function"]["arguments"])
    assert sent == {"unparsed_arguments": '{"command": "ls'}
    assert result.tool_calls[0].raw_arguments == '{"command": "ls'
    assert result.tool_calls[0].status is ToolStatus.INVALID


async def test_reasoning_goes_back_to_the_server_and_is_listed_per_turn():
    result, requests = await over_http(
        message(None, tool_call({"command": "ls"}), reasoning_content="I should look."), message("done")
    )
    assert requests[1]["messages"][1]["reasoning_content"] == "I should look."
    assert result.reasoning_per_turn == ["I should look.", None]


async def test_thinking_inside_the_content_stays_there_and_is_not_doubled():
    result, _ = await over_http(message("<think>hm</think>done"))
    assert result.messages[-1] == {"role": "assistant", "content": "<think>hm</think>done"}
    assert result.reasoning_per_turn == ["hm"]


class Duck:
    """A server in hermes-agent's style: objects, not dicts, and `get_state`."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.calls: list[dict[str, Any]] = []

    async def chat_completion(self, **options: Any) -> Any:
        self.calls.append(options)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def get_state(self) -> dict[str, Any]:
        return {"nodes": ["n"]}


def objects(content: str | None, *made: Any, finish: str = "stop") -> Any:
    answer = SimpleNamespace(content=content, tool_calls=list(made) or None)
    return SimpleNamespace(choices=[SimpleNamespace(message=answer, finish_reason=finish)])


async def test_a_server_in_hermes_agents_style_is_driven_with_its_keywords():
    function = SimpleNamespace(name="terminal", arguments='{"command": "ls"}')
    duck = Duck(objects(None, SimpleNamespace(id="a", function=function)), objects("done"))
    result = await HermesAgentLoop(duck, [tool()], {"terminal"}, tool_handler=echo, extra_body={"x": 1}).run(user())
    assert set(duck.calls[0]) == {"messages", "n", "temperature", "tools", "extra_body"}
    assert duck.calls[0]["n"] == 1
    assert result.managed_state == {"nodes": ["n"]}
    assert [m["role"] for m in result.messages] == ["user", "assistant", "tool", "assistant"]
    no_tools = Duck(objects("hi"))
    await HermesAgentLoop(no_tools).run(user())
    assert set(no_tools.calls[0]) == {"messages", "n", "temperature"}


async def test_a_server_in_hermes_agents_style_that_fails_or_answers_nothing_counts_one_turn():
    for answer in (None, SimpleNamespace(choices=[]), RuntimeError("boom")):
        result = await HermesAgentLoop(Duck(answer)).run(user())
        assert result.outcome is Outcome.API_ERROR
        assert result.turns_used == 1


async def test_a_server_that_already_retried_is_not_retried_again():
    class RetryError(Exception):
        last_attempt = SimpleNamespace(exception=lambda: ConnectionError("refused"))

    duck = Duck(RetryError("gave up"))
    result = await HermesAgentLoop(duck, retry=FAST).run(user())
    assert result.outcome is Outcome.API_ERROR
    assert len(duck.calls) == 1


async def test_dropped_connections_of_a_server_in_hermes_agents_style_are_tried_again():
    duck = Duck(ConnectionResetError("reset"), TimeoutError("late"), objects("done"))
    result = await HermesAgentLoop(duck, retry=FAST).run(user())
    assert result.outcome is Outcome.FINISHED


async def test_a_model_server_is_taken_as_it_is():
    result = await HermesAgentLoop(ScriptedServer(says("x"))).run(user())
    assert result.messages[-1]["content"] == "x"


def test_what_is_not_a_server_is_refused_with_what_would_be_one():
    with pytest.raises(TypeError, match="chat_completion"):
        HermesAgentLoop(object())
    with pytest.raises(ValueError, match="model="):
        HermesAgentLoop(AsyncOpenAI(base_url="http://127.0.0.1:1", api_key="x"))


async def test_a_failed_request_leaves_the_conversation_as_it_was():
    duck = Duck(ModelRefused("no"), objects("done"))
    conversation = ChatServer(duck).open(user(), [])
    with pytest.raises(ModelError):
        await conversation.sample(Sampling())
    await conversation.sample(Sampling())
    assert duck.calls[0]["messages"] == duck.calls[1]["messages"]


def test_a_counter_makes_lengths_known():
    server = ChatServer(Duck(), count=lambda messages, tools: 7 * len(messages))
    assert server.count_tokens(user(), []) == 7
    assert ChatServer(Duck()).count_tokens(user(), []) is None


@pytest.mark.parametrize(
    ("message", "reasoning"),
    [
        ({"reasoning_content": "a", "reasoning": "b"}, "a"),
        ({"reasoning": "b", "reasoning_details": [{"text": "c"}]}, "b"),
        ({"reasoning_details": [{"type": "summary"}, {"text": "c"}, {"text": "d"}]}, "c"),
        (SimpleNamespace(reasoning_details=[SimpleNamespace(text="c")]), "c"),
        ({"content": "<think>\nhm\n</think>\nok"}, "hm"),
        ({"content": "hm</think>ok"}, "hm"),
        ({"content": "<think>never ends"}, "never ends"),
        ({"content": "[THINK]x[/THINK]y"}, "x"),
        ({"content": "<think></think>ok"}, None),
        ({"content": "plain"}, None),
        ({"content": None, "reasoning_content": ""}, None),
        (SimpleNamespace(), None),
    ],
)
def test_reasoning_is_found_in_the_known_order(message, reasoning):
    assert extract_reasoning(message) == reasoning
