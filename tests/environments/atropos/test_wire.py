"""What goes over the wire is the group, whole, in the JSON that run-api reads."""

from __future__ import annotations

import gzip
import json

from atroposlib.api.server import ScoredData
from hypothesis import given
from hypothesis import strategies as st

from environments.atropos.outbox import encode_group
from support.atropos_envs import numbered_group

floats = st.floats(allow_nan=False, allow_infinity=False)
text = st.text(st.characters(exclude_categories=["Cs"]))


def test_run_api_reads_back_every_list() -> None:
    messages = [[{"role": "user", "content": "hé\n\u2028"}]] * 4
    group = numbered_group(7, messages=messages, advantages=None, overrides=[{}, {}, {}, {}])
    read = ScoredData(**json.loads(gzip.decompress(encode_group(group, 3))))
    assert read.tokens == group["tokens"]
    assert read.masks == group["masks"]
    assert read.inference_logprobs == group["inference_logprobs"]
    assert read.messages == messages
    assert read.advantages is None
    assert read.generation_params == {"group_id": "g7"}
    assert read.env_id == 3


@given(st.lists(st.lists(floats, max_size=5), max_size=4), st.dictionaries(text, text | st.none(), max_size=3))
def test_any_group_survives_the_wire_exactly(rows: list[list[float]], params: dict[str, str | None]) -> None:
    group = {
        "tokens": [[1]],
        "inference_logprobs": rows,
        "scores": [0.1],
        "generation_params": params,
        "messages": None,
    }
    assert json.loads(gzip.decompress(encode_group(group, None))) == {**group, "env_id": None}
    assert json.loads(encode_group(group, None, compress=False)) == {**group, "env_id": None}
