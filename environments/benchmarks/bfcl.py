"""BFCL v4, the Berkeley Function Calling Leaderboard: single-turn and multi-turn items, judged by its own checker.

A single-turn item shows functions that nobody implements; what counts are the calls of the first turn. A multi-turn
item's functions act on simulated systems, and its user has the next wish whenever the agent ends a turn. Web search and
memory, which need the network and a model of embeddings, are left out.
"""

from __future__ import annotations

import ast
import json
import sys
import uuid
from collections.abc import Mapping, Sequence
from copy import deepcopy
from types import ModuleType, SimpleNamespace
from typing import Any

from pydantic import Field

from agent_loop.model.contract import Message
from agent_loop.tools.tool import ToolFailure
from agent_loop.turn.tool_call import ToolCallRecord, ToolStatus
from environments.base import AgentResult, SandboxContext, Verdict
from environments.benchmarks.packages import folder_of, needed, prompts
from environments.benchmarks.worlds import RAN, WorldEnv
from environments.errors import ConfigError
from environments.listed_items import Item, ListedItemsConfig
from sandbox_pool.errors import did_you_mean

INSTALL = "pip install 'hermes-rl[bfcl]' && pip install --no-deps bfcl-eval"
GROUPS = ("non_live", "live", "multi_turn")
NOT_ALLOWED = frozenset({"kill", "exit", "quit", "remove", "unlink", "popen", "Popen", "run"})
"""Functions that BFCL's own executor refuses."""
AFTER_A_CALL = "The call was received."
TYPES = {
    "integer": "integer",
    "number": "number",
    "float": "number",
    "double": "number",
    "long": "integer",
    "boolean": "boolean",
    "bool": "boolean",
    "array": "array",
    "list": "array",
    "tuple": "array",
    "dict": "object",
    "object": "object",
}
"""BFCL's types in JSON Schema; anything else is a text."""


class BfclConfig(ListedItemsConfig):
    """Which items of BFCL."""

    categories: list[str] = Field(
        default=list(GROUPS),
        min_length=1,
        description="BFCL's categories or groups of them, such as simple_python, live_multiple, multi_turn.",
    )
    max_agent_turns: int = Field(default=100, ge=1)


class BfclEnv(WorldEnv):
    """BFCL's single-turn and multi-turn items."""

    name = "bfcl"
    env_config_cls = BfclConfig
    config: BfclConfig

    def load_items(self, config: BfclConfig) -> list[Item]:
        utils = load_checker()
        names = utils.TEST_COLLECTION_MAPPING
        playable = [name for group in GROUPS for name in names[group]]
        items = []
        for category in config.categories:
            if category not in playable and category not in GROUPS and category != "single_turn":
                near = did_you_mean(category, [*playable, *GROUPS])
                raise ConfigError(f"env.categories: {category!r} is not a category that can be run here; {near}")
            for name in names.get(category, [category]):
                items += _items_of(utils, name)
        return list({item["id"]: item for item in items}.values())

    @property
    def has_user(self) -> bool:
        """Multi-turn items have one, whose words are the dataset's."""
        return True

    async def user_reply(self, item: Item, messages: Sequence[Message], ctx: SandboxContext) -> str | None:
        """The user's next wish."""
        said = sum(message.get("role") == "user" for message in messages)
        return _wish(item, said) if said < len(item["question"]) else None

    def format_prompt(self, item: Item) -> list[dict[str, Any]]:
        """The first wish; some single-turn items begin with a system message or an earlier exchange."""
        return [dict(message) for message in item["question"][0]]

    def schemas(self, item: Item) -> Sequence[Mapping[str, Any]]:
        return [_schema(one) for one in item["function"]]

    def unlisted(self, item: Item) -> Sequence[Mapping[str, Any]]:
        return [_schema(one) for later in item.get("missed_function", {}).values() for one in later]

    def world(self, item: Item) -> Any:
        """The simulated systems by class; none for a single-turn item."""
        return _systems(item) if _is_multi_turn(item) else {}

    def act(self, world: Any, name: str, arguments: dict[str, Any]) -> str:
        if not world:
            return AFTER_A_CALL
        if name in NOT_ALLOWED:
            raise ToolFailure(f"Function call {name} is not allowed.")
        function = next(function for system in world.values() if (function := getattr(system, name, None)) is not None)
        try:
            answer = function(**arguments)
        except Exception as error:  # as BFCL's executor: whatever a system raises is for the model to read
            raise ToolFailure(f"Error during execution: {error}") from error
        return answer if isinstance(answer, str) else json.dumps(answer, default=str)

    def judge(self, item: Item, world: Any, result: AgentResult) -> Verdict:
        if _is_multi_turn(item):
            return _judge_turns(item, result)
        calls = [{call.name: arguments} for call, arguments in written(result) if call.turn == 1]
        if "relevance" in item["category"]:
            return Verdict.of([] if bool(calls) == ("irrelevance" not in item["category"]) else ["the wrong choice"])
        checker, language = _checker("ast_eval.ast_checker").ast_checker, _language(item)
        found = checker(item["checked"], calls, item["ground_truth"], language, item["category"], MODEL)
        return Verdict.of([] if found["valid"] else [str(found["error"])[:300]])

    def solution(self, item: Item) -> Sequence[Mapping[str, Any]]:
        """BFCL's ground truth; for relevance, which has none, some call of the first function."""
        if _is_multi_turn(item):
            return _turns_that_solve(item)
        if "irrelevance" in item["category"]:
            return [{"content": "None of these functions can help with that."}]
        if "relevance" in item["category"]:
            return [{"calls": [_any_call(self.schemas(item)[0])]}]
        functions = {_plain_name(one["name"]): one for one in item["checked"]}
        return [{"calls": [_right_call(one, functions, item["category"]) for one in item["ground_truth"]]}]


# The package

MODEL = "hermes-rl"


def load_checker() -> ModuleType:
    """BFCL's loader of items. Its checker imports forty client libraries for a table of models, of which it reads one
    entry: here that table has the one entry which it needs, unless the real one is loaded already."""
    folder_of("bfcl_eval", INSTALL)
    table = "bfcl_eval.constants.model_config"
    if table not in sys.modules:
        sys.modules[table] = ModuleType(table)
        sys.modules[table].__dict__["MODEL_CONFIG_MAPPING"] = {}
    sys.modules[table].__dict__["MODEL_CONFIG_MAPPING"][MODEL] = SimpleNamespace(underscore_to_dot=True)
    _checker("ast_eval.ast_checker")
    _checker("multi_turn_eval.multi_turn_checker")
    return needed("bfcl_eval.utils", INSTALL)


def _checker(name: str) -> Any:
    return needed(f"bfcl_eval.eval_checker.{name}", INSTALL)


def _items_of(utils: Any, category: str) -> list[Item]:
    """The entries of one category. `checked` are the functions as the checker wants them, without hints."""
    entries = utils.load_dataset_entry(category)
    plain = utils.load_dataset_entry(category, include_language_specific_hint=False)
    truths = [{}] * len(entries) if "relevance" in category else utils.load_ground_truth_entry(category)
    return [
        {**entry, "category": category, "checked": bare["function"], "ground_truth": truth.get("ground_truth", [])}
        for entry, bare, truth in zip(entries, plain, truths, strict=True)
    ]


def _language(item: Item) -> Any:
    languages = needed("bfcl_eval.constants.enums", INSTALL).Language
    return {"simple_java": languages.JAVA, "simple_javascript": languages.JAVASCRIPT}.get(
        item["category"], languages.PYTHON
    )


def written(result: AgentResult) -> list[tuple[ToolCallRecord, dict[str, Any]]]:
    """The calls with their arguments as the model wrote them. BFCL judges those, whether they fit the schema or not:
    some of its own right answers do not."""
    calls = []
    for call in result.tool_calls:
        given = call.raw_arguments if isinstance(call.raw_arguments, dict) else call.arguments
        if call.status in (*RAN, ToolStatus.INVALID) and given is not None:
            calls.append((call, given))
    return calls


def _is_multi_turn(item: Item) -> bool:
    return str(item["category"]).startswith("multi_turn")


# Functions as tools


def _plain_name(name: str) -> str:
    """Names of tools have no dots; BFCL reads them so."""
    return name.replace(".", "_")


def _schema(function: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": _plain_name(function["name"]),
        "description": function.get("description", ""),
        "parameters": _json_schema(function["parameters"]),
    }


def _json_schema(node: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in node.items() if key not in ("optional", "format")}
    kept["type"] = TYPES.get(str(node.get("type")), "string")
    if "properties" in node:
        kept["properties"] = {name: _json_schema(one) for name, one in node["properties"].items()}
    if "items" in node:
        kept["items"] = _json_schema(node["items"])
    elif kept["type"] == "array":
        kept["items"] = {}
    if node.get("type") in ("any", "Any", None):
        del kept["type"]
    return kept


# Multi-turn items


def _systems(item: Item) -> dict[str, Any]:
    places = needed("bfcl_eval.constants.executable_backend_config", INSTALL)
    systems = {}
    for name in item["involved_classes"]:
        system = getattr(needed(places.CLASS_FILE_PATH_MAPPING[name], INSTALL), name)()
        if name not in places.STATELESS_CLASSES:
            config = deepcopy(item["initial_config"].get(name, {}))
            system._load_scenario(config, long_context="long_context" in item["category"])
        systems[name] = system
    return systems


def _wish(item: Item, turn: int) -> str:
    """What the user says at a turn. An empty wish is the moment at which functions are added."""
    later = item.get("missed_function", {}).get(str(turn))
    if later:
        return prompts()["bfcl_more_functions"].format(functions=json.dumps([_schema(one) for one in later]))
    return "\n".join(str(message["content"]) for message in item["question"][turn])


def _judge_turns(item: Item, result: AgentResult) -> Verdict:
    truth, turns = item["ground_truth"], _calls_by_wish(result)
    if len(turns) != len(truth):
        return Verdict.of([f"the conversation ended after {len(turns)} of {len(truth)} wishes"])
    model = uuid.uuid4().hex  # the checker keeps systems by this name, and for ever
    entry = {**item, "id": item["id"]}
    try:
        found = _checker("multi_turn_eval.multi_turn_checker").multi_turn_checker(
            turns, truth, entry, item["category"], model
        )
    finally:
        kept = vars(_checker("multi_turn_eval.multi_turn_utils"))
        for name in [name for name in kept if name.startswith(model)]:
            del kept[name]
    return Verdict.of([] if found["valid"] else [str(found.get("error_message", found))[:300]])


def _calls_by_wish(result: AgentResult) -> list[list[list[str]]]:
    """For each wish of the user the model's turns, each as its calls in Python's words."""
    ended = result.finished_naturally
    by_turn: dict[int, list[str]] = {}
    for call, arguments in written(result):
        by_turn.setdefault(call.turn, []).append(_in_python(call.name, arguments))
    number_at = {turn.message: number for number, turn in enumerate(result.turns, 1)}
    wishes: list[list[list[str]]] = []
    for place, message in enumerate(result.messages):
        if message.get("role") == "user":
            wishes.append([])
        elif (calls := by_turn.get(number_at.get(place, 0))) and wishes:
            wishes[-1].append(calls)
    return wishes if ended else wishes[:-1]


def _in_python(name: str, arguments: Mapping[str, Any]) -> str:
    """One call with literals alone, since the checker evaluates it; what is no parameter's name is left out."""
    given = (f"{key}={value!r}" for key, value in arguments.items() if key.isidentifier())
    return f"{name}({', '.join(given)})"


def _turns_that_solve(item: Item) -> list[Mapping[str, Any]]:
    functions = [*item["function"], *(one for later in item.get("missed_function", {}).values() for one in later)]
    order = {one["name"]: list(one["parameters"]["properties"]) for one in functions}
    steps: list[Mapping[str, Any]] = []
    for calls in item["ground_truth"]:
        steps += [_from_python(call, order) for call in calls]
        steps.append({"content": "Done."})
    return steps


def _from_python(text: str, order: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    call = ast.parse(text.strip(), mode="eval").body
    assert isinstance(call, ast.Call)
    name = ast.unparse(call.func)
    given = dict(zip(order.get(name, ()), (ast.literal_eval(one) for one in call.args), strict=False))
    given |= {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
    return {"name": name, "arguments": given}


# Single-turn items


def _right_call(truth: Mapping[str, Any], functions: Mapping[str, Any], category: str) -> dict[str, Any]:
    """A call that the ground truth, which lists the accepted values of each parameter, accepts."""
    ((name, accepted),) = truth.items()
    parameters = functions[_plain_name(name)]["parameters"]
    properties, required = parameters["properties"], parameters.get("required", ())
    arguments = {}
    for parameter, values in accepted.items():
        if not values or ("" in values and parameter not in required):
            continue
        value = _accepted(values)
        if category in ("simple_java", "simple_javascript"):
            value = _literal(value, properties.get(parameter, {}), category)
        arguments[parameter] = value
    return {"name": _plain_name(name), "arguments": arguments}


def _accepted(values: Sequence[Any]) -> Any:
    """The first accepted value. Within an object each key has its accepted values, too."""
    return _inner(next((value for value in values if value != ""), ""))


def _inner(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _accepted(inner) if isinstance(inner, list) else inner for key, inner in value.items() if inner != [""]
        }
    if isinstance(value, list):
        return [_inner(one) for one in value]
    return value


def _literal(value: Any, parameter: Mapping[str, Any], category: str) -> str:
    """A value as the text of a Java or JavaScript literal, which such parameters are given as."""
    kind = str(parameter.get("type"))
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"{value}{ {'long': 'L', 'float': 'f'}.get(kind, '') if category == 'simple_java' else '' }"
    if isinstance(value, str):
        return value
    if category == "simple_javascript":
        return json.dumps(value)
    if isinstance(value, dict):
        pairs = "".join(f'put("{key}", {json.dumps(one)}); ' for key, one in value.items())
        return f"new HashMap<String, Object>() {{{{ {pairs}}}}}"
    inner = [_literal(one, parameter.get("items", {}), category) for one in value]
    if kind != "ArrayList":  # of an array the checker takes texts without quotes only
        return f"new String[]{{{', '.join(inner)}}}"
    quoted = (f'"{text}"' if isinstance(one, str) else text for one, text in zip(value, inner, strict=True))
    return f"new ArrayList<>(Arrays.asList({', '.join(quoted)}))"


def _any_call(schema: Mapping[str, Any]) -> dict[str, Any]:
    empty = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
    parameters = schema["parameters"]
    needed_ones = parameters.get("required", ())
    arguments = {name: _any_value(parameters["properties"][name], empty) for name in needed_ones}
    return {"name": schema["name"], "arguments": arguments}


def _any_value(parameter: Mapping[str, Any], empty: Mapping[str, Any]) -> Any:
    return parameter["enum"][0] if parameter.get("enum") else empty.get(str(parameter.get("type")), "x")


if __name__ == "__main__":
    BfclEnv.cli()
