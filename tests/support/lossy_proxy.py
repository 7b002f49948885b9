"""A proxy in front of an HTTP server that lets requests through and cuts some connections instead of answering."""

import asyncio
import urllib.parse

from aiohttp import ClientSession, ClientTimeout, web
from yarl import URL


class LossyProxy:
    def __init__(self, target):
        self.target = target
        self.lost = 0
        self._pattern = None
        self._left = 0

    def lose_answers_to(self, pattern, count):
        """The next requests whose path contains this arrive, but nobody hears of it."""
        self._pattern, self._left = pattern, count

    def relent(self):
        """Let every answer through again."""
        self._left = 0

    async def __aenter__(self):
        self._session = ClientSession(timeout=ClientTimeout(total=None))
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", self._pass)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.address = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        await self._session.close()
        await self._runner.cleanup()

    async def _pass(self, request):
        url = URL(self.target + request.raw_path, encoded=True)
        headers = {name: value for name, value in request.headers.items() if name.startswith(("X-Nomad", "Content-T"))}
        async with self._session.request(request.method, url, data=await request.read(), headers=headers) as answer:
            if self._left and self._pattern in urllib.parse.unquote(request.path):
                await answer.read()
                self._left -= 1
                self.lost += 1
                request.transport.abort()
                raise web.HTTPInternalServerError
            response = web.StreamResponse(status=answer.status)
            await response.prepare(request)
            try:
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
            except (ConnectionError, asyncio.CancelledError):
                request.transport.abort()
                raise
            return response
