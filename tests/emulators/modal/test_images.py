"""Images through the SDK: recipes are recorded, builds take time and fail, names are published or unknown."""

import modal
import pytest
from modal import Image, Sandbox
from modal.exception import ImageBuildError, NotFoundError

from emulators.modal.steps import shell


async def test_an_image_is_built_once_and_its_environment_is_the_sandboxs(app, emulator):
    emulator.limits.image_build_s = 0.2
    image = Image.from_registry("debian:12").env({"COLOUR": "dark blue"}).workdir("/deep/inside")
    for _ in range(2):
        sandbox = await Sandbox.create.aio(app=app, image=image)
        assert (await shell(sandbox, "echo $COLOUR; pwd"))[1] == "dark blue\n/deep/inside\n"
    assert {recorded.builds for recorded in emulator.images} == {1}
    assert "FROM debian:12" in emulator.images[0].definition.dockerfile_commands


async def test_a_dockerfile_is_recorded_with_its_arguments(app, emulator, tmp_path):
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text("FROM debian:12\nARG WHO\nCOPY data /data\nRUN echo $WHO\n")
    (tmp_path / "data").write_text("x")
    image = Image.from_dockerfile(dockerfile, context_dir=tmp_path, build_args={"WHO": "me"})
    await image.build.aio(app)
    recipes = [recorded.definition for recorded in emulator.images]
    assert any("RUN echo $WHO" in recipe.dockerfile_commands for recipe in recipes)
    assert any(dict(recipe.build_args) == {"WHO": "me"} for recipe in recipes)


async def test_a_failing_build_says_why_and_can_be_tried_again(app, emulator):
    image = Image.from_registry("debian:12").run_commands("boom")
    emulator.image_failures["boom"] = "E: no such package"
    with pytest.raises(ImageBuildError, match="no such package"):
        await Sandbox.create.aio(app=app, image=image)
    emulator.image_failures.clear()
    await Sandbox.create.aio(app=app, image=image)


async def test_a_published_name_is_known_and_any_other_is_not(app, emulator):
    emulator.publish("tools:v1")
    await Sandbox.create.aio(app=app, image=Image.from_name("tools:v1"))
    with pytest.raises(NotFoundError):
        await Sandbox.create.aio(app=app, image=Image.from_name("tools:v2"))
    image = Image.from_registry("debian:12")
    await image.build.aio(app)
    await image.publish.aio("own")
    sandbox = await Sandbox.create.aio(app=app, image=modal.Image.from_name("own"))
    assert await sandbox.poll.aio() is None
