"""axe-core, fetched once from the npm registry into .tools/ and checked by its hash; tests skip where there is none."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import urllib.request
from functools import cache
from pathlib import Path

import pytest

from support.browser import Page

VERSION = "4.14.0"
SHA1 = "a9819d3932a8198fbe935d8cbd8afcdfecbcf31d"
ADDRESS = f"https://registry.npmjs.org/axe-core/-/axe-core-{VERSION}.tgz"
CACHED = Path(__file__).resolve().parents[2] / ".tools" / f"axe-{VERSION}.js"
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


@cache
def axe_source() -> str:
    if not CACHED.is_file():
        try:
            with urllib.request.urlopen(ADDRESS, timeout=60) as answer:
                data = answer.read()
        except OSError as error:
            pytest.skip(f"axe-core cannot be downloaded here: {error}")
        assert hashlib.sha1(data).hexdigest() == SHA1, "the registry gave another axe-core"
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            source = archive.extractfile("package/axe.min.js")
            assert source is not None
            CACHED.parent.mkdir(parents=True, exist_ok=True)
            partial = CACHED.with_suffix(".partial")
            partial.write_bytes(source.read())
            partial.replace(CACHED)
    return CACHED.read_text("utf-8")


async def faults(page: Page) -> list[str]:
    """What axe-core finds wrong with a page as it is shown now, one line for each element."""
    await page.js(axe_source() + "; 0")
    run = f"axe.run({{ runOnly: {json.dumps(RULES)} }}).then((r) => r.violations)"
    found = await page.js(run)
    return [f"{v['id']}: {node['html'][:160]}: {node['any'][:1]}" for v in found for node in v["nodes"]]
