"""The tree in the docstring of `sandbox_pool.errors` is the tree of the classes."""

from sandbox_pool import errors
from sandbox_pool.providers.modal import modal_calls
from sandbox_pool.providers.nomad import nomad_api

MODULES = (errors, modal_calls, nomad_api)


def drawn():
    """Name -> parent, read from the drawing."""
    parents, above = {}, {}
    for line in errors.__doc__.splitlines()[2:]:
        text = line.strip()
        depth = (len(line) - len(line.lstrip())) // 2
        name = text.removeprefix("+ ").split()[0]
        above[depth] = name
        parents[name] = above.get(depth - 1)
    return parents


def test_the_drawn_tree_is_the_tree_of_the_classes():
    defined = {
        name: value.__bases__[0].__name__
        for module in MODULES
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, errors.SandboxError) and value.__module__ == module.__name__
    }
    assert drawn() == {**defined, "SandboxError": None}
