"""Frames and helper messages survive any chunking and refuse what is not theirs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_pool.server.serving import wire
from sandbox_pool.server.slots import channel
from sandbox_pool.server.slots import exec_messages as output

HEADERS = st.dictionaries(
    st.text(max_size=5), st.integers(-(2**53), 2**53) | st.text(max_size=10) | st.none(), max_size=4
)


@given(frames=st.lists(st.tuples(HEADERS, st.binary(max_size=50)), max_size=6), cuts=st.lists(st.integers(1, 20)))
def test_frames_survive_any_chunking(frames: list[tuple[dict[str, object], bytes]], cuts: list[int]) -> None:
    data = b"".join(wire.encode(header, body) for header, body in frames)
    decoder, found, sizes = wire.Decoder(), [], iter(cuts)
    while data:
        size = next(sizes, len(data))
        found += decoder.feed(data[:size])
        data = data[size:]
    assert found == frames


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        b"\xff" * 16,
        b"\0\0\0\x08\0\0\0\x09xxxx",
        b"\0\0\0\x06\0\0\0\x02[]",
        b"\0\0\0\x06\0\0\0\x02{x",
    ],
)
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.Decoder().feed(data + bytes(16))


def test_a_stranger_cannot_make_the_server_hold_much() -> None:
    with pytest.raises(wire.WireError):
        wire.Decoder(wire.MAX_HELLO).feed(wire.encode({}, bytes(wire.MAX_HELLO)))


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.text(st.characters(blacklist_characters="\0"), max_size=9))),
    st.binary(),
)
def test_helper_messages_survive(fields: list[tuple[str, str]], raw: bytes) -> None:
    fields = [(key, value.encode("utf-8", "ignore").decode()) for key, value in fields]
    message = channel.decode_message(channel.encode_message("op", fields, raw)[4:])
    assert (message.op, message.fields, message.raw) == ("op", dict(fields), raw)


def test_a_field_cannot_smuggle_another() -> None:
    with pytest.raises(ValueError, match="NUL"):
        channel.encode_message("op", [("a", "x\0b=y")])


@given(st.text(max_size=200), st.integers(1, 50))
def test_shown_output_keeps_forty_and_sixty_percent(text: str, cap: int) -> None:
    text = text.encode("utf-8", "ignore").decode()
    data = text.encode()
    if len(text) <= cap:
        assert output.shown(data, b"", False, len(text), cap, "log") == (text, 0)
        return
    head, tail = cap * 2 // 5, cap - cap * 2 // 5
    shown, omitted = output.shown(data[: 4 * head], data[-4 * tail - 4 :], True, len(text), cap, "log")
    assert omitted == len(text) - cap
    assert shown.startswith(text[:head])
    assert shown.endswith(text[-tail:])
