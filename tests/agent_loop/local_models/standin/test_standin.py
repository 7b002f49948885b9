"""The stand-in policy: a server that speaks everybody's protocol, with nothing to download."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request

import aiohttp
import pytest

from agent_loop.local_models.standin import (
    POLICIES,
    Fault,
    PolicyRequest,
    Reply,
    StandIn,
    chatml_tokenizer,
    named_policy,
)
from agent_loop.local_models.standin.policies import call, failing, slow
from agent_loop.local_models.standin.sampler import logprobs_of
from tool_parsers import get_parser

TOOLS = [
    {
        "type": "function",
        "function": {"name": "run", "description": "d", "parameters": {"type": "object", "properties": {}}},
    }
]
PROMPT = [1, 300, 2]


async def post(server: StandIn, path: str, body: dict) -> tuple[int, dict]:
    async with aiohttp.ClientSession() as session, session.post(server.url + path, json=body) as response:
        return response.status, await response.json()


def chat(*contents: str, **more) -> dict:
    messages = [{"role": "user", "content": c} for c in contents]
    return {"model": "m", "messages": messages, "tools": TOOLS, **more}


async def test_chat_gives_structured_calls_as_vllm_does():
    async with StandIn() as server:
        status, answer = await post(server, "/v1/chat/completions", chat("do it"))
    (choice,) = answer["choices"]
    assert status == 200
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == "Step 1."
    (made,) = choice["message"]["tool_calls"]
    assert made["function"]["name"] == "run"
    assert json.loads(made["function"]["arguments"]) == {"command": "echo step 1"}
    assert answer["usage"]["total_tokens"] == len(server.log[0].prompt_ids) + len(server.log[0].sampled_ids)


async def test_chat_leaves_malformed_markup_in_the_text():
    async with StandIn(lambda _: "<tool_call>\nnot json\n</tool_call>") as server:
        _, answer = await post(server, "/v1/chat/completions", chat("do it"))
    message = answer["choices"][0]["message"]
    assert "tool_calls" not in message
    assert message["content"] == "<tool_call>\nnot json\n</tool_call>"


async def test_chat_without_tools_gives_text():
    async with StandIn() as server:
        _, answer = await post(server, "/v1/chat/completions", chat("x") | {"tools": None})
    assert "<tool_call>" in answer["choices"][0]["message"]["content"]


async def test_the_openai_client_is_served():
    from openai import AsyncOpenAI

    async with StandIn() as server, AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        answer = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x"}], tools=TOOLS, n=2
        )
    assert [c.message.tool_calls[0].function.name for c in answer.choices] == ["run", "run"]


@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        ("/generate", {"prompt": {"prompt_token_ids": PROMPT}, "n": 3, "max_tokens": 50}, lambda a: len(a["logprobs"])),
        ("/generate", {"input_ids": PROMPT, "sampling_params": {"n": 3}}, len),
        ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"n": 3}}, lambda a: len(a["choices"])),
        ("/v1/completions", {"prompt": PROMPT, "n": 3}, lambda a: len(a["choices"])),
        ("/completion", {"prompt": PROMPT, "n_cmpl": 3}, len),
    ],
)
async def test_several_samples_of_one_prompt(path, body, count):
    async with StandIn() as server:
        status, answer = await post(server, path, body)
    assert (status, count(answer), len(server.log)) == (200, 3, 3)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"nothing": 1}),
        ("/v1/completions", {}),
        ("/v1/chat/completions", {"messages": 3}),
        ("/inference/v1/generate", {"token_ids": [1]}),
        ("/completion", {}),
    ],
)
async def test_a_bad_request_is_a_400(path, body):
    async with StandIn() as server:
        status, answer = await post(server, path, body)
    assert status == 400
    assert "bad request" in answer["error"]["message"]


async def test_every_request_and_answer_is_in_the_log():
    async with StandIn(failing(every=2)) as server:
        for _ in range(4):
            await post(server, "/generate", {"prompt": {"prompt_token_ids": PROMPT}, "max_tokens": 99})
    assert [e.status for e in server.log] == [200, 503, 200, 503]
    good = server.log[0]
    assert good.prompt_ids == PROMPT
    assert good.logprobs == logprobs_of(good.sampled_ids, PROMPT)


async def test_a_dropped_connection_is_a_fault_too():
    def policy(_):
        raise Fault(0)

    async with StandIn(policy) as server:
        with pytest.raises(aiohttp.ClientError):
            await post(server, "/generate", {"prompt": {"prompt_token_ids": PROMPT}})


async def test_the_same_prompt_gives_the_same_answer_and_another_seed_another():
    answers = []
    for seed in (0, 0, 1):
        async with StandIn(named_policy("wild"), seed=seed) as server:
            samples = [await server.sample("/", [1, k], {}, max_tokens=300) for k in range(5)]
        answers.append([s.ids for s in samples])
    assert answers[0] == answers[1] != answers[2]


async def test_a_policy_may_be_async_and_take_its_time():
    async def policy(request: PolicyRequest) -> Reply:
        return Reply("hi", delay_s=0.01, ended=False)

    async with StandIn(slow(policy, 0.01)) as server:
        sample = await server.sample("/", PROMPT, {}, max_tokens=10)
    assert (sample.text, sample.finish_reason) == ("hi", "length")


def request(text: str) -> PolicyRequest:
    from random import Random

    return PolicyRequest(text, Random(0), 0)


def test_a_policy_sees_the_task_the_tool_and_the_results():
    tokenizer = chatml_tokenizer()
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "the task"},
        {"role": "assistant", "content": call("run", {})},
        {"role": "tool", "tool_call_id": "c", "content": "out"},
    ]
    text = tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, tokenize=False)
    seen = request(text)
    assert (seen.task, seen.tool, seen.results) == ("the task", "run", 1)


@pytest.mark.parametrize("name", ["good", "looping"])
def test_clean_policies_write_clean_calls(name):
    parsed = get_parser("hermes").parse(named_policy(name)(request("")))
    assert [c.ok and c.complete and not c.repaired for c in parsed.calls] == [True]


def test_the_malformed_policy_writes_no_call_that_could_run():
    from random import Random

    for seed in range(20):
        text = named_policy("malformed")(PolicyRequest("", Random(seed), 0))
        parsed = get_parser("hermes").parse(text)
        assert not parsed.good_calls or parsed.errors
        assert parsed.errors or parsed.calls


def test_an_unknown_policy_lists_the_known_ones():
    with pytest.raises(ValueError, match="good"):
        named_policy("brilliant")
    assert {"good", "sloppy", "malformed", "looping", "slow", "failing"} <= set(POLICIES)


def test_logprobs_depend_on_every_id_before():
    whole = logprobs_of([5, 6, 7], [1, 2, 3])
    assert whole == logprobs_of([1, 2, 3, 5, 6, 7])[3:]
    assert logprobs_of([7], [1, 2, 2, 3, 5, 6]) != whole[2:]
    assert all(p < 0 for p in whole)


def test_the_tokenizer_is_the_same_every_time_and_loses_nothing():
    tokenizer = chatml_tokenizer()
    text = "<|im_start|>user\nnaïve 日本 🙂\t{'a': 1}<|im_end|>\n<tool_call>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert (ids[0], tokenizer.eos_token_id) == (1, 2)
    assert sum(ids) == sum(chatml_tokenizer().encode(text, add_special_tokens=False))


@pytest.mark.timeout(120)
def test_it_runs_as_a_program():
    command = [sys.executable, "-m", "agent_loop.local_models.standin", "--policy", "looping", "--latency-s", "0.01"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().strip()
            body = json.dumps({"prompt": [1, 2], "max_tokens": 50}).encode()
            asked = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(asked, timeout=30) as response:
                assert "<tool_call>" in json.load(response)["choices"][0]["text"]
        finally:
            process.kill()
