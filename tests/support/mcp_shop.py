"""A real MCP server, written with the SDK: over stdin and stdout, or with a port as its argument over HTTP."""

import os
import sys
import time
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import EmbeddedResource, ImageContent, ResourceLink, TextContent, TextResourceContents

server = MCPServer("shop")
PRICES = {"apples": 2.5, "cheese": 14.0}
sold: list[str] = []


@server.tool()
def price(goods: str) -> float:
    """Price of one kilogram in euros."""
    if goods not in PRICES:
        raise ToolError(f"there are no {goods}")
    return PRICES[goods]


@server.tool(name="sell-goods")
def sell(goods: str, kilograms: float = 1.0) -> str:
    """Sell goods to the customer."""
    sold.append(goods)
    return f"sold {kilograms:g} kg of {goods}, {len(sold)} so far"


@server.tool()
def long(chars: int) -> str:
    """A long text."""
    return "é" * chars


@server.tool()
def leaflet() -> list[Any]:
    """A text, a file, a link and a picture."""
    file = TextResourceContents(uri="file:///a.txt", mime_type="text/plain", text="cheese is cheap")
    return [
        TextContent(type="text", text="look:"),
        EmbeddedResource(type="resource", resource=file),
        ResourceLink(type="resource_link", uri="https://shop.example/b", name="b"),
        ImageContent(type="image", data="AAAA", mime_type="image/png"),
    ]


@server.tool()
def where() -> str:
    """The folder that the server runs in, and a variable of it."""
    return f"{Path.cwd()} {os.environ.get('SHOP', '')}"


@server.tool()
def sleep(seconds: float) -> str:
    """Take some time."""
    time.sleep(seconds)
    return "slept"


@server.tool()
def die() -> str:
    """End the server, with a word on stderr."""
    print("the shop burnt down", file=sys.stderr, flush=True)
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
