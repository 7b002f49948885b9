"""The key of a spec says which slots are interchangeable."""

from hypothesis import given
from hypothesis import strategies as st

from sandbox_pool.spec import SandboxSpec


@given(files=st.dictionaries(st.text(min_size=1), st.binary()), env=st.dictionaries(st.text(min_size=1), st.text()))
def test_any_content_has_a_key_and_the_order_of_its_parts_does_not_matter(files, env):
    spec = SandboxSpec(files=files, env=env)
    turned = SandboxSpec(files=dict(reversed(files.items())), env=dict(reversed(env.items())))
    assert spec.key() == turned.key()


def test_what_differs_has_another_key():
    specs = [
        SandboxSpec(),
        SandboxSpec(files={"a": b"\xff"}),
        SandboxSpec(files={"a": b"\xfe"}),
        SandboxSpec(files={"b": b"\xff"}),
        SandboxSpec(env={"a": "b"}),
        SandboxSpec(memory_mb=1),
        SandboxSpec(network="host"),
    ]
    assert len({spec.key() for spec in specs}) == len(specs)
